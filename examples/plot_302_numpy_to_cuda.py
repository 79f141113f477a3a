# /// script
# requires-python = ">=3.11"
# dependencies = ["fusebook[book]", "scikit-learn"]
#
# [tool.uv.sources]
# fusebook = { path = "..", editable = true }
# ///
"""
From NumPy to C++ and CUDA: k-means
===================================

One line of NumPy says which centre is nearest to each point. `torch.compile`
turns it into C++ and into Triton without a change, or nearly so. This page
takes the line along that way, step by step, with what each step removed:
bytes copied, bytes moved, passes over memory. Then it writes the kernel
itself, for two coordinates and for a hundred, iterates it to the end, and
asks of every statement that was published about the way whether it still
holds.

With a CUDA GPU everything here is measured as the page runs. Without one, the
kernels run in Triton's interpreter and the times are replayed from the record
of a GPU that is named beside them. What is compiled for the CPU is compiled
as the page is built, where there is a C++ compiler.

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
#    c_j' = \frac{1}{|\{i: \ell_i = j\}|} \sum_{i:\; \ell_i = j} x_i
#
# The first half is the assignment, the second the update; k-means alternates
# between them until the centres stand still. The assignment in NumPy is one
# line, found in many a textbook, and it was the example when Quansight and
# PyTorch announced in 2023 that ``torch.compile`` takes NumPy code:
# `Compiling NumPy code into C++ or CUDA via torch.compile
# <https://pytorch.org/blog/compiling-numpy-code/>`_. This page follows the
# announcement and tests it.

# sphinx_gallery_tags = ["k-means", "kmeans", "NumPy"]
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings

import fusebook  # before triton: it decides whether kernels are interpreted
from fusebook import plots, tables, timing
from fusebook.cards.kmeans import KMEANS_ASSIGN, KMEANS_STEP, KMEANS_UPDATE
from fusebook.check import yardstick
from fusebook.inputs import generator
from fusebook.kernels.kmeans import (
    _few_steps,
    _kmeans_candidates,
    _kmeans_differences,
    _nearest,
    _screened,
)
from fusebook.page import (
    Folded,
    Listing,
    Source,
    by_clock,
    claim,
    claims,
    downloads,
    exercise,
    holds,
    measured,
    provenance,
    say,
    solution,
    study,
    table,
)

import numpy as np
import pandas as pd
import torch
import triton
import triton.language as tl

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
# The published example plants two, around (5, 5) and (10, 10). Both lie on the
# diagonal, so the picture is its own mirror image. Exchange x and y, in the
# points, in a formula, in the printed code, and every label stays right: a
# mistake of that kind can be published, and nobody can see it. Ours are
# crooked on purpose.


def axes_exchanged(X, means):
    """A mistake: it takes the coordinates of the centres in turn."""
    return nearest(X, means[:, ::-1])


straight, where_straight = planted(100_000, DIAGONAL)
on_diagonal = nearest(straight, DIAGONAL)
claims(
    claim(
        "On the diagonal, the mistake changes not a single label",
        np.array_equal(axes_exchanged(straight, DIAGONAL), on_diagonal),
    ),
    claim(
        "On our clusters it is wrong for more than half of the points",
        (axes_exchanged(X, CROOKED) != truth).mean() > 0.5,
    ),
    claim(
        "where the line of NumPy finds nearly all of them",
        (nearest(X, CROOKED) == truth).mean() > 0.99,
    ),
    holds(
        "The published line finds the right cluster for all points (2023)",
        np.array_equal(on_diagonal, where_straight),
    ),
    say(
        "Of {n} points around the published centres, {lost} lie nearer to the "
        "other one: noise is noise, and no code is to blame.",
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
# Each operation of the line is a pass over memory that writes all it has
# found. For n points in the plane and two centres, in float64:

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
    "written once, {least:.2f} GB, so fusing the line is worth {gain:.1f} "
    "times, by traffic alone, before any other core or machine is asked.",
    chain=chain / 1e9,
    least=least / 1e9,
    gain=chain / least,
)

# %%
# Compiled for the CPU
# ~~~~~~~~~~~~~~~~~~~~
#
# A program of its own, so that its log can be read and its threads can be
# counted. It is NumPy, and one line more. The number of threads is given to
# the compiler, too: it is written into the code.
#
# ``TORCH_LOGS=output_code`` in its environment is all that it takes to see
# what was generated. The next two settings save time on a machine that has
# compiled nothing yet: Inductor need not try every set of vector instructions
# that the CPU says it has, nor start a pool of compilers for a few functions.

SCRIPT = """
import json, sys, time
import numpy as np
import torch


def nearest(X, means):
    return np.argmin(np.linalg.norm(X - means[:, None], axis=2), axis=0)


def seconds(function):
    function()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[2]


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
    x, m = X.astype(dtype), means.astype(dtype)
    row |= {"dtype": dtype, "threads": int(threads)}
    row["NumPy"] = seconds(lambda: nearest(x, m))
    torch.compiler.reset()
    torch.set_num_threads(int(threads))
    compiled = torch.compile(nearest, options={"cpp.threads": int(threads)})
    row["same"] = bool((compiled(x, m) == nearest(x, m)).all())
    row["compiled"] = seconds(lambda: compiled(x, m))
    print(json.dumps(row))
"""


def generated(log):
    """The code in a log of output_code, without the log's own columns."""
    lines = re.findall(r"^.*?\[__output_code\] ?(.*)$", log, re.MULTILINE)
    return "\n".join(lines)


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


def kernel_of(code, begin):
    """The last kernel among the rest of what is generated."""
    found = re.findall(rf"{begin}.*?^'''", code, re.DOTALL | re.MULTILINE)
    return found[-1].rstrip("'").rstrip() if found else "(nothing)"


def compiled_for_the_cpu():
    points, most = 1_000_000, os.cpu_count() or 1
    ways = [f"float64:{n}" for n in sorted({1, 2, most})]
    out, code = run(SCRIPT, str(points), "float32:2", *ways)
    frame = pd.DataFrame([json.loads(line) for line in out.splitlines()])
    frame["points"], frame["cores"] = points, most
    frame["torch"] = torch.__version__
    frame["code"] = kernel_of(code, 'extern "C"')
    return frame


compiler = shutil.which(os.environ.get("CXX") or "g++")
cpu = measured("kmeans_cpu", compiled_for_the_cpu, live=compiler is not None)


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


near = by_threads(cpu).set_index(["dtype", "threads"])["times as fast"]
table(
    by_threads(cpu).set_index(["dtype", "threads"]),
    where_and_when(cpu),
    fold=False,
)

# %%
# So much for the machine on which this page was built, which may have had
# other things to do. The machine of the record had not:

served = cpu
if (
    cpu.attrs["origin"].machine is None
):  # taken here and now, and on no record's machine
    served = measured("kmeans_cpu", compiled_for_the_cpu, live=False)
far = by_threads(served).set_index(["dtype", "threads"])["times as fast"]
table(
    by_threads(served).set_index(["dtype", "threads"]),
    where_and_when(served),
    fold=False,
)

# %%
# A loop over points, eight at a time or so in vector registers, the two
# centres unrolled in its body, shared among threads by OpenMP. The differences
# and the distances exist in registers only.

code = cpu["code"][0]
Folded("The C++ that was generated", Listing(code, "cpp"))

# %%
here, there = (times.loc["float64"] for times in (near, far))
claims(
    holds(
        "One loop over all points (2023)",
        len(re.findall(r"for\(int64_t x0=", code)) == 1,
    ),
    holds(
        "Compiled for several threads, OpenMP shares it among them (2023)",
        "#pragma omp for" in code,
    ),
    holds(
        "Unless told otherwise PyTorch uses all cores (2023)",
        served["by itself"][0] == served["cores"][0],
    ),
    holds(
        "9 times as fast as NumPy on one core, in float64 (2023)",
        there[1] >= 9,
    ),
    holds(
        "57 times on all of them (2023: 32 cores; the record: {cores})",
        there.iloc[-1] >= 57,
        cores=served["cores"][0],
    ),
    claim(
        "On two threads at least 10 times NumPy in the record, {gain:.0f} "
        "times",
        there[2] >= 10,
        gain=there[2],
    ),
    claim(
        "and here, {gain:.0f} times",
        here[2] >= 10,
        fatal=False,
        gain=here[2],
    ),
    claim("The labels are NumPy's", cpu["same"]),
    say(
        "In float32, in the record, it is {gain:.0f} times NumPy on two "
        "threads: twice the points in a vector register, and half the bytes.",
        gain=far["float32", 2],
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
        "The line runs under a device as it stands (2023)",
        isinstance(written, np.ndarray),
    ),
    say("PyTorch {v} says: {why}.", v=torch.__version__, why=str(written)[:60])
    if isinstance(written, str)
    else say("PyTorch {v} runs it.", v=torch.__version__),
    say("`X**2` says: {why}.", why=str(power)[:60])
    if isinstance(power, str)
    else say("`X**2` runs."),
    claim(
        "With `np.subtract` in place of the minus sign it runs",
        isinstance(named, np.ndarray)
        and np.array_equal(named, nearest(some, its_means)),
    ),
)

# %%
# Where an operator of arrays fails, ``-`` or ``**``, the device context is at
# fault: it unwraps the operator too early, and finds a tensor's method missing
# in an array. Functions are not concerned. So write operators as functions, or
# leave the context away and hand over tensors that are on the GPU already.
# Here is what ran on the recorded GPU.

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
# And this is what Inductor made of it: readable Triton, as promised. Note how
# a point is read: x from every second number, and y from every second number,
# by a load each.

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
# From arrays in and arrays out to tensors that never leave the GPU, and what
# each step takes away: passes over memory first, then the bytes of a number,
# then the way over the bus, where the points go, 16 bytes each in float64, and
# from where the labels return, 8 bytes each. All results are fresh, as they
# are in such a program: labels that return into a new array wait for its
# memory too. The second line of copies has them return into an array that is
# there already: the difference is no way over the bus.


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
        "8 times NumPy with arrays in and out (2023, on an RTX 2060)",
        climb("float64", "arrays in and out") >= 8,
    ),
    holds(
        "In float32 NumPy itself gets about 9 % faster (2023)",
        numpy_gains,
    ),
    holds("and the compiled code 40 % faster (2023)", compiled_gains),
    holds(
        "and 11 times as fast as NumPy (2023)",
        climb("float32", "arrays in and out") >= 11,
    ),
    holds(
        "200 times NumPy when tensors stay on the GPU, in float32 (2023)",
        climb("float32", "tensors in and out") >= 200,
    ),
    claim(
        "By the host's clock our call is as quick as the compiled one's",
        ms["float32", "Fusebook, tensors in and out"]
        <= 1.02 * ms["float32", "compiled, tensors in and out"],
        fatal=False,
    ),
    claim(
        "With arrays in and out, {share:.0%} of the time is copies",
        ms["float32", "the copies alone"]
        > ms["float32", "compiled, arrays in and out"] / 2,
        fatal=False,
        share=ms["float32", "the copies alone"]
        / ms["float32", "compiled, arrays in and out"],
    ),
    say(
        "With labels that return into an old array the copies take {reused} "
        "of what they take with fresh ones: the rest is the memory of the "
        "host.",
        reused=reused(ms),
    ),
    say(
        "Staying on the GPU is worth {gain:.0f} times; halving the width of a "
        "number, there, {half:.1f} times.",
        gain=ms["float32", "compiled, arrays in and out"]
        / ms["float32", "compiled, tensors in and out"],
        half=gained("compiled, tensors in and out"),
    ),
)

# %%
# The advice
# ~~~~~~~~~~
#
# Each piece as a check that passes or fails as the page is built.
# ``numpy_default_float`` decides what creation functions make. The program
# above set it before anything else, and then added ``np.zeros(3)`` to an array
# of float32, as this function does:


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
        "all that it meets (2023)",
        default == np.float64 == zeros(narrow).dtype,
    ),
    holds(
        'numpy_default_float = "float32" makes it float32, and all stays as '
        "narrow as it was (2023)",
        cpu["with zeros"][0] == "float32",
    ),
    holds(
        "It still does once other NumPy code has been compiled",
        late == np.float32,
    ),
)

# %%
# Where the last answer is no, the setting is read once in the life of a
# process, by the first NumPy code that is compiled: make it before that, or
# wonder why nothing happens.
#
# *Graph breaks.* An ``if`` on a value that is only known at run time cuts the
# graph in two, and each part is compiled, launched and fused by itself.
# Written without branches it is one graph. A backend is a function of a graph,
# so graphs are easily counted.


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
    holds("An if on a value breaks the graph (2023)", len(cut) > 1),
    holds("Branchless code does not (2023)", len(whole) == 1),
    claim(
        "Both mean the same", np.allclose(branching(ones), branchless(ones))
    ),
    holds(
        "A write through a boolean mask is supported (2023)",
        np.array_equal(compiled(clipped_in_place)(ones), clipped(ones)),
    ),
    holds(
        "and hampers: it breaks the graph, or takes more operations than "
        "`np.where` (2023)",
        len(written_in) > 1 or sum(written_in) > sum(chosen),
    ),
)

# %%
# *Loops.* A loop with a known number of turns is unrolled: the graph grows
# with the turns, and so does the time to compile it. A loop that ends when
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
claims(
    holds("A for loop is unrolled (2023)", sum(long) > 3 * sum(short)),
    holds(
        "A loop that ends when something has converged is not (2023)",
        len(endless) > 1,
    ),
    say(
        "4 turns are {short} operations, 16 turns {long}; the body alone is "
        "{one}, compiled once for {turns} turns. Compiled with its loop, the "
        "same comes to {cut} graphs.",
        short=sum(short),
        long=sum(long),
        one=sum(one),
        turns=turns,
        cut=len(endless),
    ),
    claim(
        "A compiled body under a plain loop converges to what NumPy does",
        np.allclose(flat, until_flat(ones, body)[0]),
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
        "`import torch._numpy as np` runs the program eagerly (2023)",
        np.array_equal(debugged.tensor.numpy(), nearest(some, CROOKED)),
    ),
    holds(
        "It is much slower than PyTorch's own functions: {times:.1f} times "
        "their time for ten points, here (2023)",
        slow > 2 * quick,
        times=slow / quick,
    ),
)

# %%
# *NumPy's scalars and type promotion*, where compiled NumPy was said to differ
# from NumPy. Whether it does, and whether NumPy has moved meanwhile:

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
        "A NumPy scalar times a list repeats the list (2023, NumPy)",
        plain["u * [1, 2, 3]"] == "[1, 2, 3, 1, 2, 3]",
    ),
    holds(
        "Compiled, it is an array and multiplies (2023)",
        under["u * [1, 2, 3]"].startswith("array([2, 4, 6]"),
    ),
    holds(
        "`int(u)` brings the repetition back (2023)",
        under["int(u) * [1, 2, 3]"] == "[1, 2, 3, 1, 2, 3]",
    ),
    holds(
        "A 0-D array times a list multiplies, in both (2023)",
        plain["np.asarray(2) * [1, 2, 3]"].startswith("array([2, 4, 6]")
        and under["np.asarray(2) * [1, 2, 3]"].startswith("array([2, 4, 6]"),
    ),
    holds(
        "int8 plus 127 is int8, in both (2023)",
        plain["np.zeros(1, np.int8) + 127"]
        == under["np.zeros(1, np.int8) + 127"]
        == "array([127], int8)",
    ),
    holds(
        "int8 plus 128 is int16 in NumPy (2023, NumPy 1)",
        plain["np.zeros(1, np.int8) + 128"] == "array([128], int16)",
    ),
    holds(
        "Compiled NumPy follows NumPy 2 there (2023)",
        plain["np.zeros(1, np.int8) + 128"]
        == under["np.zeros(1, np.int8) + 128"],
    ),
)

# %%
# The kernel
# ----------
#
# Step one: what the compiler made, by hand
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A program takes BLOCK points, finds the nearest of two centres in registers,
# and writes labels. Nothing else exists.


@triton.jit
def nearest_of_two(l_ptr, x_ptr, c_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + 2 * i, mask=inside)  # every second number
    y = tl.load(x_ptr + 2 * i + 1, mask=inside)  # and the others
    dx0, dy0 = x - tl.load(c_ptr), y - tl.load(c_ptr + 1)
    dx1, dy1 = x - tl.load(c_ptr + 2), y - tl.load(c_ptr + 3)
    # No square roots: they change no order.
    label = dx1 * dx1 + dy1 * dy1 < dx0 * dx0 + dy0 * dy0
    tl.store(l_ptr + i, label.to(l_ptr.dtype.element_ty), mask=inside)


def step_one(points, centres, label_dtype=torch.int64):
    labels = points.new_empty(len(points), dtype=label_dtype)
    grid = (triton.cdiv(len(points), 1024),)
    nearest_of_two[grid](labels, points, centres, len(points), BLOCK=1024)
    return labels


# %%
# Step two: both coordinates by one load
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The coordinates x and y lie side by side. Read as 2 BLOCK neighbouring
# numbers, a thread gets 16 bytes, two whole points, in one instruction;
# ``tl.split`` tells x from y without leaving the registers. The mask is the
# other half of the trick: a mask that may end anywhere makes the compiler load
# number by number, so programs whose points are all there have none.


@triton.jit
def pairs_of_two(l_ptr, x_ptr, c_ptr, n, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    at = tl.arange(0, 2 * BLOCK)
    if first + BLOCK <= n:
        pairs = tl.load(x_ptr + 2 * first + at)
    else:
        pairs = tl.load(x_ptr + 2 * first + at, mask=at < 2 * (n - first))
    x, y = tl.split(tl.reshape(pairs, [BLOCK, 2]))
    dx0, dy0 = x - tl.load(c_ptr), y - tl.load(c_ptr + 1)
    dx1, dy1 = x - tl.load(c_ptr + 2), y - tl.load(c_ptr + 3)
    label = (dx1 * dx1 + dy1 * dy1 < dx0 * dx0 + dy0 * dy0).to(
        l_ptr.dtype.element_ty
    )
    if first + BLOCK <= n:
        tl.store(l_ptr + first + i, label)
    else:
        tl.store(l_ptr + first + i, label, mask=i < n - first)


def step_two(points, centres, label_dtype=torch.int64):
    labels = points.new_empty(len(points), dtype=label_dtype)
    grid = (triton.cdiv(len(points), 256),)
    pairs_of_two[grid](labels, points, centres, len(points), BLOCK=256)
    return labels


# %%
# The library's kernel
# ~~~~~~~~~~~~~~~~~~~~
#
# The library's kernel takes up to eight coordinates and any number of centres,
# unrolled where there are few.

Source(_nearest, doc=False)

# %%
# The update in the same pass
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# While a point is in registers, it can be added to its centre's sum, and the
# points need not be read again. Each program adds up its own points, one sum
# for each centre and coordinate, and leaves them as a part; a second kernel
# adds the parts in float64, in the order of the programs. No atomics: the same
# bits in every run. So centres that stand still stand *exactly* still, and the
# iteration knows its end.

Source(_few_steps, doc=False)

# %%
# Where there are too many centres for registers, points are sorted by label
# first and each cluster is added up as a stretch, again in one order. A
# cluster without points keeps its centre.
#
# More coordinates: a product
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# With d = 64 and k = 256 there are 16384 differences a point, and they do not
# fit anywhere. But
#
# .. math::
#
#    |x - c|^2 = |x|^2 - 2\, x \cdot c + |c|^2
#
# is a matrix product, which tensor cores do fast, in TF32: factors of eleven
# bits. And it cancels: far from the origin three large numbers leave a small
# one. Two losses, and yet the labels shall be those of differences. So the
# product only *screens*. Subtract the mean of the centres from everything,
# which costs nothing and removes a common distance from the origin. Multiply
# in TF32, keep the best and the second best distance of each point, and ask
# whether they are further apart than the product can be wrong, which is known:
# two factors, off by one part in 2048 each. Where they are not, the point goes
# on a list.

Source(_screened, doc=False)

# %%
# The list is screened again, by three TF32 products of the leading and the
# remaining bits, which are nearly as good as float32. What is still in doubt
# after that is compared by differences. How long the lists are, only the GPU
# knows: a fixed number of programs takes turns.

Source(_kmeans_differences, doc=False)

# %%
# Few centres, any number of coordinates
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Up to 128 centres are one tile of the product, so a point is read once, for
# its norm and for the product. And the tile knows more than that a point is in
# doubt: it knows between which centres. A bit for each goes on the list, and
# only these candidates are compared by differences.

Source(_kmeans_candidates, doc=False)

# %%
# Is it right?
# ------------
#
# Labels are compared by what they mean, the distance to the centre that was
# chosen: where two are equally near, either is right, and ours is the lower
# number, as ``argmin`` gives. The reference is computed in float64. Points
# come *near* the origin, *far* from it, in *blobs*, and *rough*, where a third
# of the points, and of the centres, lies a hundred away.


def by_product(points, centres):
    """As it is usually written."""
    return (centres.square().sum(1) - 2 * points @ centres.T).argmin(1)


def judged(way, n, d, k, dtype, laws):
    rows = []
    for law in laws.split():
        dims = {"n": n, "d": d, "k": k, "labels": "int64", "law": law}
        inputs = KMEANS_ASSIGN.make(generator(1), dtype, **dims)
        yard = yardstick(KMEANS_ASSIGN, inputs)
        verdict = yard.judge(way(*inputs[:2]))
        found = verdict.score, verdict.limit, verdict.ok
        rows.append((law, d, str(dtype)[6:], way.__name__, *found))
    return rows


columns = ["law", "d", "dtype", "way", "score", "limit", "right"]
assign, single = fusebook.kmeans_assign, torch.float32
cases = [
    (assign, 300, 2, 3, single, "near far blobs rough"),
    (assign, 40, 24, 24, single, "near far blobs rough"),
    (assign, 30, 24, 24, torch.float16, "rough"),
    (assign, 30, 24, 24, torch.float64, "rough"),
    (by_product, 4000, 24, 24, single, "near far blobs rough"),
]
scores = pd.DataFrame(
    [row for case in cases for row in judged(*case)], columns=columns
)
table(scores.set_index(["d", "dtype", "law", "way"]), "Scores and limits")

# %%
ours = scores["way"] == "kmeans_assign"
plain_two = KMEANS_ASSIGN.make(
    generator(2), single, n=2517, d=2, k=2, labels="int64", law="near"
)[:2]
usual = scores[~ours].set_index("law")["right"]
bits = []
inputs = KMEANS_STEP.make(
    generator(3), torch.float32, n=700, d=2, k=3, labels="int64", law="blobs"
)
for _ in range(3):
    labels = fusebook.kmeans_assign(*inputs[:2])
    bits.append(fusebook.kmeans_update(inputs[0], labels, 3))
claims(
    claim("Ours is right wherever the points are", scores["right"][ours]),
    claim(
        "Steps one and two label as the library does",
        all(
            torch.equal(step(*plain_two), assign(*plain_two))
            for step in (step_one, step_two)
        ),
    ),
    claim("The usual product is right near the origin", usual["near"]),
    claim("and wrong far from it", not usual["far"]),
    claim(
        "Three updates of the same points are equal bit for bit",
        all(torch.equal(bits[0], other) for other in bits),
    ),
)

# %%
# K-means to its end
# ~~~~~~~~~~~~~~~~~~
#
# From the same start, in float64 NumPy, line by line, and by the library,
# until the centres stand still.


def lloyd(X, means):
    """k-means as in the textbook."""
    while True:
        label = nearest(X, means)
        moved = np.stack([X[label == j].mean(0) for j in range(len(means))])
        if np.array_equal(moved, means):
            inertia = np.square(X - means[label]).sum()
            return means, label, inertia
        means = moved


small = X[::4]
start = small[[10, 20, 30]]
textbook, its_labels, its_inertia = lloyd(small, start)
found = fusebook.kmeans(small, 3, init=start, tol=0)
title = "What k-means found"
plots.clusters(small, found.labels, found.centres, title=title)

# %%
claims(
    claim(
        "The same labels as the textbook's",
        np.array_equal(found.labels, its_labels),
    ),
    claim(
        "the same centres", np.allclose(found.centres, textbook, rtol=1e-12)
    ),
    claim(
        "and the same inertia",
        abs(found.inertia / its_inertia - 1) < 1e-12,
    ),
    claim(
        "The centres are the planted ones, coordinate by coordinate",
        max(np.abs(found.centres - middle).max(1).min() for middle in CROOKED)
        < 0.2,
    ),
    claim(
        "With x and y exchanged they would be far from all of them",
        min(
            np.linalg.norm(found.centres[:, ::-1] - middle, axis=1).min()
            for middle in CROOKED
        )
        > 2,
    ),
)

# %%
# How fast?
# ---------
#
# The plane
# ~~~~~~~~~
#
# There are 20 million points and two centres, by the width of a label.
# ``check=False``: to see whether all points are finite, they would have to be
# read once more, and the host would have to wait for the answer.

plane_ways = (
    "eager",
    "torch.cdist",
    "torch.compile",
    "fusebook",
    "fusebook, checked",
)
plane = asked.results(variants=plane_ways)
double = asked.results(
    config="20000000x2x2",
    dtype="float64",
    variants=("eager", "torch.compile", "fusebook"),
)
both = tables.together(plane, double)
table(
    tables.times(both, words=True),
    "Assignment in the plane: cold time in microseconds",
    fold=False,
)

# %%
# The checked call has no time there: it waits for the answer, and what waits
# cannot be timed by events. The host's clock can:

by_host = plane.set_index(["labels", "variant"])["call_us"]
wait, go = (
    by_host.xs(name, level="variant")["int64"]
    for name in ("fusebook, checked", "fusebook")
)
say(
    "A checked call keeps the caller for {wait:.0f} microseconds, one that "
    "is not checked, and waited for, {go:.0f}.",
    wait=wait,
    go=go,
)

# %%
# What were the steps above worth? Each kernel is timed with the constants that
# it was shown with.


def teaching():
    x, c, _ = KMEANS_ASSIGN.make(
        generator(0), torch.float32, n=N, d=2, k=2, labels="int64", law="blobs"
    )
    rows = []
    for labels in (torch.int64, torch.int32, torch.uint8):

        def library(labels=labels):
            return assign(x, c, label_dtype=labels, check=False)

        times = timing.cold(
            {
                "step one": lambda labels=labels: step_one(x, c, labels),
                "step two": lambda labels=labels: step_two(x, c, labels),
                "the library's": library,
            }
        )
        us = {name: q.q50 * 1e6 for name, q in times.items()}
        rows.append({"labels": str(labels)[6:], **us})
    return pd.DataFrame(rows)


steps = measured("kmeans_teaching", teaching, by_device=True).set_index(
    "labels"
)
table(steps, "Cold time in microseconds, by labels", fold=False)

# %%

gain = steps["step one"] / steps["step two"]
claims(
    claim(
        "Loads by pairs pay with labels of a byte: {gain:.2f} times as fast",
        gain["uint8"] > 1.2,
        fatal=False,
        gain=gain["uint8"],
    ),
    claim(
        "With wider labels they hardly do: within 5 %",
        (gain.drop("uint8") - 1).abs() < 0.05,
        fatal=False,
    ),
)

# %%
# Where 16 bytes a point have to be moved, a plain kernel is at the roof
# already, Inductor's too: the cache puts together what its threads ask for in
# halves. The less there is to move, the more each instruction counts.

# %%
# More of both
# ~~~~~~~~~~~~
#
# Eager PyTorch is left out: in the larger rows its differences alone take
# dozens of gigabytes. ``torch.cdist`` and the compiled product write n k
# distances and read them again.

wide = asked.results(
    config="wide",
    dtype="float32",
    variants=(
        "torch.cdist",
        "torch.compile",
        "torch.compile, product",
        "fusebook",
    ),
)
table(
    tables.times(wide, words=True),
    "Assignment: cold time in microseconds",
    fold=False,
)

# %%
# A fair opponent is the matrix product by itself, in float32 without TF32: it
# has not compared anything yet, and has lost the digits that cancel.


def bare_products():
    rows = []
    for n, d, k in ((1_000_000, 64, 256), (65536, 128, 1024)):
        dims = {"n": n, "d": d, "k": k, "labels": "int64", "law": "near"}
        points, centres, _ = KMEANS_ASSIGN.make(
            generator(0), torch.float32, **dims
        )
        out = torch.empty(n, k, device="cuda")
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        times = timing.cold(
            {
                "bare product": lambda p=points, c=centres, o=out: torch.mm(
                    p, c.T, out=o
                ),
                "fusebook": lambda p=points, c=centres: fusebook.kmeans_assign(
                    p, c, check=False
                ),
            }
        )
        torch.set_float32_matmul_precision(before)
        us = {name: q.q50 * 1e6 for name, q in times.items()}
        rows.append({"n": n, "d": d, "k": k, **us})
    return pd.DataFrame(rows)


bare = measured("kmeans_product", bare_products, by_device=True)
table(
    bare.set_index(["n", "d", "k"]),
    "The product alone and the whole assignment: cold, microseconds",
    fold=False,
)

# %%
# Where the points are
# ~~~~~~~~~~~~~~~~~~~~
#
# Where the points are decides how many are in doubt. Far from the origin the
# shift takes care of it. *Rough* is the worst case: centres as far apart as
# the clusters are from the origin, and every point is compared three times.

laws = asked.results(
    config="laws", dtype="float32", variants=("torch.cdist", "fusebook")
)
table(
    tables.times(laws, words=True),
    "1M points, d = 64, k = 256, by the law of the points: cold, microseconds",
    fold=False,
)

# %%
table(
    laws.set_index(["law", "variant"])[["status", "score", "note"]],
    "Who is right",
)

# %%
# The update and the whole iteration
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# One pass where the sums fit in registers; the two public functions one after
# the other elsewhere, which is also what a program does that calls them by
# itself. Eager updates by atomic additions: with two centres, millions of
# points wait for the same six numbers. *Skewed* means that nine of ten points
# belong to one cluster.

update = asked.results(
    KMEANS_UPDATE,
    config="plane,wide",
    dtype="float32",
    variants=("eager", "fusebook"),
)
step = asked.results(
    KMEANS_STEP,
    config="plane,wide",
    dtype="float32",
    variants=("eager", "fusebook", "fusebook, two calls"),
)
table(
    tables.times(update, words=True),
    "The update: cold time in microseconds",
    fold=False,
)

# %%
table(
    tables.times(step, words=True),
    "A whole iteration: cold time in microseconds",
    fold=False,
)

# %%
# Assignment, update and iteration beside each other, interleaved, and a
# hundred iterations compared bit by bit:


def iteration():
    rows = []
    for n, d, k in ((N, 2, 2), (1_000_000, 64, 256)):
        dims = {"n": n, "d": d, "k": k, "labels": "int64", "law": "blobs"}
        x, c, _ = KMEANS_STEP.make(generator(0), torch.float32, **dims)
        labels = fusebook.kmeans_assign(x, c, check=False)

        def assign(x=x, c=c):
            return fusebook.kmeans_assign(x, c, check=False)

        def update(x=x, c=c, k=k, labels=labels):
            return fusebook.kmeans_update(x, labels, k, centres=c, check=False)

        def apart(x=x, c=c, k=k):
            found = fusebook.kmeans_assign(x, c, check=False)
            return fusebook.kmeans_update(x, found, k, centres=c, check=False)

        def fused(x=x, c=c):
            ours = KMEANS_STEP.variants["fusebook"].run
            return ours(x, c, torch.int64)

        ways = {"assign": assign, "update": update}
        ways |= {"both, two calls": apart, "one iteration": fused}
        us = {w: q.q50 * 1e6 for w, q in timing.cold(ways).items()}
        first = fused()
        same = 0
        for _ in range(100):
            same += all(map(torch.equal, first, fused()))
        rows.append({"n": n, "d": d, "k": k, **us, "same of 100": same})
    return pd.DataFrame(rows)


whole_step = measured("kmeans_iteration", iteration, by_device=True)
table(
    whole_step.set_index(["n", "d", "k"]),
    "Cold time in microseconds, and runs with equal bits",
    fold=False,
)

# %%
# Beyond NumPy
# ~~~~~~~~~~~~
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
# K-means whole
# ~~~~~~~~~~~~~
#
# K-means whole, beside scikit-learn on the same machine's CPU, from the same
# start until the centres stand still. The time of ours is with the points on
# the GPU; *arrays* copies them there and the result back. In the plane the
# clusters are far apart, and both go the same way. The wide points start from
# sixteen of their own number, several of one cluster: a point halfway between
# two centres may go either way by its last bit, and from there on the paths
# differ.


def to_the_end():
    from sklearn.cluster import KMeans

    rows = []
    for name, d, k, n in (
        ("plane", 2, 3, 2_000_000),
        ("wide", 16, 16, 200_000),
    ):
        rng = np.random.default_rng(0)
        middle = CROOKED if d == 2 else 4 * rng.standard_normal((k, d))
        label = rng.integers(k, size=n)
        X = (middle[label] + rng.standard_normal((n, d))).astype(np.float32)
        first = X[:k]
        on = torch.from_numpy(X).cuda(), torch.from_numpy(first).cuda()
        made = KMeans(k, init=first, n_init=1, tol=0, algorithm="lloyd")
        start = time.perf_counter()
        made.fit(X)
        theirs = time.perf_counter() - start
        ours = fusebook.kmeans(on[0], k, init=on[1], tol=0)
        rows.append(
            {
                "points": name,
                "n": n,
                "d": d,
                "k": k,
                "scikit-learn, s": theirs,
                "fusebook, s": wall(
                    lambda on=on, k=k: fusebook.kmeans(
                        on[0], k, init=on[1], tol=0
                    ),
                    3,
                ),
                "fusebook, arrays, s": wall(
                    lambda X=X, k=k, first=first: fusebook.kmeans(
                        X, k, init=first, tol=0
                    ),
                    1,
                ),
                "inertia, scikit-learn": float(made.inertia_),
                "inertia, fusebook": ours.inertia,
                "iterations, scikit-learn": made.n_iter_,
                "iterations, fusebook": ours.iterations,
            }
        )
    return pd.DataFrame(rows)


end = measured("kmeans_end", to_the_end)
end["case"] = [
    f"{row.points}: {row.n} x {row.d}, k = {row.k}" for row in end.itertuples()
]
table(
    end.drop(columns=["points", "n", "d", "k"])
    .set_index("case")
    .astype(object)
    .T,
    "K-means until the centres stand still",
    fold=False,
)

# %%
provenance(plane)

# %%
downloads(plane, "kmeans_assign")

# %%
# How far from the roof?
# ----------------------
#
# In the plane the roof is memory: read 8 bytes a point in float32, write the
# label. With the usual int64 labels, half of the traffic is labels. They are
# numbers from 0 to k - 1, so a byte is plenty for most, and the narrower they
# are, the lower the roof.

plots.dots(both, of="roof")

# %%
# The roof is measured on gigabytes, and 180 MB of points and uint8 labels are
# over before the memory has found its stride: filling and emptying the pipes
# takes as long as ever. How long would it take only to *read* the points? This
# kernel leaves one number a program and knows no labels at all. And how long
# to copy as many bytes as points and labels have?


@triton.jit
def points_read(most_ptr, x_ptr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    x = tl.load(x_ptr + first + tl.arange(0, BLOCK))
    tl.store(most_ptr + tl.program_id(0), tl.max(x, 0))


def reading():
    x, c, _ = KMEANS_ASSIGN.make(
        generator(0), torch.float32, n=N, d=2, k=2, labels="uint8", law="blobs"
    )
    block = 8192
    programs = x.numel() // block  # the rest is less than a thousandth
    most = x.new_empty(programs)
    half = torch.empty(9 * N // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    times = timing.cold(
        {
            "points read, nothing written": lambda: points_read[(programs,)](
                most, x, BLOCK=block, num_warps=8
            ),
            "copy of as many bytes": lambda: other.copy_(half),
            "fusebook, uint8 labels": lambda: fusebook.kmeans_assign(
                x, c, label_dtype=torch.uint8, check=False
            ),
        }
    )
    rows = [(name, q.q50 * 1e6) for name, q in times.items()]
    return pd.DataFrame(rows, columns=["way", "cold, us"])


read = measured("kmeans_reading", reading, by_device=True).set_index("way")
narrow_roof = tables.where(plane, labels="uint8")["roof_us"].iloc[0]
read["times the roof"] = read["cold, us"] / narrow_roof
table(read, "Beside the assignment with uint8 labels", fold=False)

# %%

plots.dots(both, of="copy")

# %%
shares = tables.shares(both).drop(columns="first call, s")
table(shares, "Each way in the plane, cold", fold=False)

# %%
# Lessons
# -------
#
# What follows was decided by the numbers above. *Cold* is after a flush of the
# L2 cache; medians within 2 % count as equal. First the targets of the
# kernels:


def over(df, other="roof", **wanted):
    """Our time over another at the points wanted."""
    rows = tables.where(df, variant="fusebook", status="ok", **wanted)
    return rows["cold_us"] / rows[f"{other}_us"]


products = bare.set_index(["n", "d", "k"])
big = tables.where(wide, d=[64, 128])
iterations = whole_step.set_index(["n", "d", "k"])
in_plane = iterations.loc[(N, 2, 2)]
claims(
    claim(
        "float32 points, int64 labels: at most 1.10 times the roof",
        over(plane, labels="int64") <= 1.10,
    ),
    claim("float64 points: at most 1.10 times the roof", over(double) <= 1.10),
    claim(
        "int32 labels: at most 1.15 times the roof",
        over(plane, labels="int32") <= 1.15,
    ),
    claim(
        "Never slower than torch.compile in the plane",
        tables.ratio(both, "fusebook", "torch.compile") <= 1.02,
    ),
    claim(
        "Never slower than a copy of the same bytes",
        over(both, "copy") <= 1.02,
    ),
    claim(
        "1M x 64 by 256 and 65536 x 128 by 1024: at least twice as fast as "
        "torch.cdist and argmin",
        tables.ratio(big, "torch.cdist", "fusebook") >= 2,
    ),
    claim(
        "and as torch.compile of the line",
        tables.ratio(big, "torch.compile", "fusebook") >= 2,
    ),
    claim(
        "and at most 1.5 times the bare product in float32",
        products["fusebook"] / products["bare product"] <= 1.5,
    ),
    claim(
        "A whole iteration in the plane: at most 2.2 times the assignment",
        in_plane["both, two calls"] <= 2.2 * in_plane["assign"],
        fatal=False,
    ),
    claim(
        "and in one pass at most 1.5 times",
        in_plane["one iteration"] <= 1.5 * in_plane["assign"],
        fatal=False,
    ),
    claim(
        "Ours is right wherever the points are",
        tables.where(laws, variant="fusebook")["status"] == "ok",
    ),
    holds(
        "So is torch.cdist with argmin",
        tables.where(laws, variant="torch.cdist")
        .set_index("law")["status"]
        .eq("ok"),
    ),
    claim(
        "A hundred iterations give the same bits",
        iterations["same of 100"] == 100,
    ),
    claim(
        "The inertia is scikit-learn's",
        (end["inertia, fusebook"] / end["inertia, scikit-learn"] - 1).abs()
        < 1e-4,
    ),
)

# %%
# These were hoped for, too, and are shown as they came out:

claims(
    claim(
        "uint8 labels: at most 1.15 times the roof",
        over(plane, labels="uint8").iloc[0] <= 1.15,
        fatal=False,
    ),
    claim(
        "At least twice as fast as a compiled product, as scikit-learn "
        "writes it",
        tables.ratio(big, "torch.compile, product", "fusebook") >= 2,
        fatal=False,
    ),
    claim(
        "The update is never slower than PyTorch's atomics",
        tables.ratio(update, "fusebook", "eager") <= 1.02,
        fatal=False,
    ),
    say(
        "uint8 labels take {times:.2f} times the roof, which is more than was "
        "hoped for. To read the points alone takes {alone:.2f} times the "
        "roof, a copy of as many bytes {copy:.2f} times.",
        times=over(plane, labels="uint8").iloc[0],
        alone=read["times the roof"]["points read, nothing written"],
        copy=read["times the roof"]["copy of as many bytes"],
    ),
)

# %%
# Where it does not win
# ~~~~~~~~~~~~~~~~~~~~~
#
# Every point at which some other way is faster by more than 2 % when both are
# cold; the verdict by the host's clock stands at the ladder. An update of many
# centres with few points each is the atomics' own ground: they hardly meet,
# and nothing has to be sorted first.

table(
    tables.losses(pd.concat([both, wide, laws])),
    "Assignments lost: the fastest other way, and how far behind we are",
    fold=False,
)

# %%
table(
    tables.losses(update),
    "Updates lost",
    fold=False,
)

# %%
# By the caller's clock
# ~~~~~~~~~~~~~~~~~~~~~
#
# The device works while the host queues what comes next. So an eager program
# of many calls pays the larger of the two times for each, *paid*, and a short
# kernel is as fast as its launch.

callers = tables.alike(pd.concat([both, wide, laws, update]))
by_clock(callers)

# %%
table(tables.clocks(callers), "Every way by every clock, in microseconds")

# %%
table(tables.losses(callers, kind="paid"), "Points lost by an eager program")

# %%
table(tables.losses(callers, kind="call"), "Points lost by a call, waited for")

# %%
# What became of the statements of 2023
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The main ones in one list, in the order of the announcement, on the versions
# of this page and of the record:

runs = ways.set_index("way")["runs"]
statements = {
    "the line finds the right cluster for all points": np.array_equal(
        on_diagonal, where_straight
    ),
    "compiled, it gives NumPy's labels": cpu["same"],
    "9 times NumPy on one core": there[1] >= 9,
    "57 times on all cores (32 then)": there.iloc[-1] >= 57,
    "all cores are used by default": served["by itself"][0]
    == served["cores"][0],
    "one loop in C++": len(re.findall(r"for\(int64_t x0=", code)) == 1,
    "the line runs under torch.device as it stands": isinstance(
        written, np.ndarray
    ),
    "on CUDA, too": runs["the line, arrays, under the device"] == "yes",
    # The last is shown; where it is number 0, it is also the first.
    "one Triton kernel": "_0(in_ptr0" in its_code,
    "8 times NumPy with copies": climb("float64", "arrays in and out") >= 8,
    "11 times in float32": climb("float32", "arrays in and out") >= 11,
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
    "a write through a mask hampers": len(written_in) > 1
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
claims(*(holds(f"{text} (2023)", true) for text, true in statements.items()))

# %%
# What to take to the next kernel:
#
# - Count the bytes over the bus before anything else. Compiling code whose
#   arrays travel with every call compiles the wrong thing.
# - Fusing by a compiler gets a short chain most of the way. What it could not
#   know is how wide a label needs to be, that two coordinates are neighbours,
#   and that the update wants the same points.
# - A fast, imprecise answer with a bound is worth more than a precise one: it
#   tells which few answers have to be worked out again.
# - Test with data that has no symmetry that your mistakes might have.
#
# Exercises
# ---------
#
# Each has a function that is wrong, and a check that says so. Mend it; run the
# page, or the notebook, again. The checks need no GPU.
#
# 1. City blocks
# ~~~~~~~~~~~~~~
#
# In a city one walks along the streets: the distance is the sum of the
# absolute differences. Change the kernel of step two.


def city(points, centres):
    return step_two(points, centres)


def in_the_city(points, centres):
    far = (points - centres[:, None]).abs().sum(2)
    return far.argmin(0)


def drawn(seed, n, d, k, away=0.0):
    rng = generator(seed)
    x, c = (
        torch.randn(rows, d, generator=rng, device=rng.device)
        for rows in (n, k)
    )
    return x + away, c + away


exercise(
    "city counts blocks, not the way of a crow",
    city,
    in_the_city,
    [drawn(4, 300, 2, 2), drawn(5, 517, 2, 2)],
)

# %%
# 2. Far from home
# ~~~~~~~~~~~~~~~~
#
# The usual product is right near the origin and wrong a thousand away. One
# line mends it.


def far_product(points, centres):
    return by_product(points, centres)


def by_differences(points, centres):
    return (points - centres[:, None]).square().sum(2).argmin(0)


exercise(
    "far_product finds the nearest centre a thousand away",
    far_product,
    by_differences,
    [drawn(6, 200, 24, 12), drawn(7, 200, 24, 12, away=1000.0)],
)

# %%
# 3. Nobody came
# ~~~~~~~~~~~~~~
#
# This update divides by zero where a cluster has lost all its points. Let such
# a centre keep its place.


def moved(points, labels, centres):
    sums = torch.zeros_like(centres).index_add_(0, labels, points)
    counts = torch.bincount(labels, minlength=len(centres))
    return sums / counts[:, None]


def meant(points, labels, centres):
    means = [points[labels == j].mean(0) for j in range(len(centres))]
    return torch.stack(
        [
            old if mean.isnan().any() else mean
            for mean, old in zip(means, centres, strict=True)
        ]
    )


x, c = drawn(8, 50, 3, 4)
full = torch.arange(50, device=x.device) % 4
exercise(
    "moved leaves an empty cluster's centre in its place",
    moved,
    meant,
    [(x, full, c), (x, full % 2, c)],
)

# %%
solution("solutions/plot_302_numpy_to_cuda.py")
# sphinx_gallery_thumbnail_number = 2
