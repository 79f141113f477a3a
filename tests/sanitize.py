"""Every operator, strategy and edge under compute-sanitizer's four tools: ``nox -s sanitize``.

Each tool first has to find what was planted for it: a store behind the end of a tensor, a race between two warps, a
barrier that a warp meets in two halves, a load of what nobody wrote. Tensors have memory of their own, without a cache,
so that an access outside of one is outside of all. Processes run beside each other and take the next case that no other
has; each prints what it begins and ends, and the sanitizer prints what it finds between.

    python tests/sanitize.py                   # all, in at most ten minutes
    python tests/sanitize.py memcheck softmax  # a tool, and the operators whose names contain a word
"""

import argparse
import concurrent.futures
import faulthandler
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import trials

PLANTED = {
    "memcheck": ("store behind the end", "x[n + threadIdx.x] = 1;"),
    "racecheck": (
        "race",
        "__shared__ float of[64]; of[threadIdx.x] = threadIdx.x; x[threadIdx.x] = of[63 - threadIdx.x];",
    ),
    "synccheck": (
        "barrier that a warp meets in halves",
        "if (threadIdx.x % 32 < 16) { __syncthreads(); x[0] = 1; } else { __syncthreads(); __syncwarp(); x[1] = 2; }",
    ),
    "initcheck": ("load of what nobody wrote", "x[threadIdx.x] = y[threadIdx.x];"),
}
#: What a run ends with: "ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)".
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)")
BEGUN, DONE = "-- run: ", "-- done"
QUIET = ("COMPUTE-SANITIZER", "SUMMARY", "Host Frame", "Saved host backtrace")
#: Operators that take rows by whole vectors of 16 bytes, the last of which may reach beyond the last number: what it
#: finds there is passed over. Only their tensors have memory of whole 16 bytes, and those of all others end where they
#: end: all memory of a GPU is mapped in pages, which no vector at a multiple of 16 bytes crosses.
WHOLE = (
    "softmax", "softmax_backward", "cross_entropy", "linear_cross_entropy",
    "rms_norm", "add_rms_norm", "layer_norm", "rms_norm_fp8",
)  # fmt: skip
#: Seconds after which a case hangs.
HANGS = 120


# Under the sanitizer


def plant(tool):
    import torch

    kernel = torch.cuda._compile_kernel(
        'extern "C" __global__ void planted(float* x, const float* y, int n) { ' + PLANTED[tool][1] + " }", "planted"
    )
    x, y = torch.zeros(64, device="cuda"), torch.empty(64, device="cuda")
    kernel((1, 1, 1), (64, 1, 1), (x, y, 64))
    torch.cuda.synchronize()


def cases(words):
    """Each operator, variant of ours and edge, in a dtype: the next one for each edge.

    What comes first has every edge, and every variant, at least once.
    """
    from fusebook.cards import OPS

    first, rest = [], []
    for op in OPS.values():
        if words and not any(word in op.name for word in words):
            continue
        ours = [name for name, v in op.variants.items() if name.startswith("fusebook") and set(v.needs) <= {"cuda"}]
        for j, name in enumerate(ours):
            for i, dims in enumerate(op.edges):
                once = i % len(ours) == j or (i == 0 and j >= len(op.edges))
                (first if once else rest).append((op, name, dims, op.dtypes[i % len(op.dtypes)]))
    return first, rest


def said(case):
    op, name, dims, dtype = case
    return f"{op.name}, {name}, {dims}, {dtype}"


def placed(t, unit):
    """A tensor on the GPU, in memory of so many bytes as its own are, or as many more as make it whole units."""
    import torch

    bytes_ = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    memory = torch.zeros(-(-len(bytes_) // unit) * unit, dtype=torch.uint8)
    memory[: len(bytes_)] = bytes_
    place = t.storage_offset(), t.shape, t.stride()
    return torch.empty(0, dtype=t.dtype, device="cuda").set_(memory.cuda().untyped_storage(), *place)


def roomy(empty):
    """`torch.empty` for `WHOLE`, of whose results, and what operators hold meanwhile, the same is true."""
    import torch

    def roomier(*size, **options):
        made = empty(*size, **options)
        if not made.is_cuda or made.nbytes % 16 == 0:
            return made
        memory = empty(made.nbytes // 16 * 16 + 16, dtype=torch.uint8, device=made.device)
        memory[made.nbytes :] = 0
        place = memory.untyped_storage(), 0, made.shape, made.stride()
        return empty(0, dtype=made.dtype, device=made.device).set_(*place)

    return roomier


def zeroed(padded):
    """`padded` of `losses`, whose pads, and nothing else, count as written."""

    def zeros(shape, pitch, *rest):
        made = padded(shape, pitch, *rest)
        made[:, shape[1] :].zero_()
        return made

    return zeros


def run(tool, taken, words):
    """Run the cases that no other process has taken; a file of their number in a folder says that one is."""
    import torch
    import torch.utils._pytree as pytree

    from fusebook.kernels import losses
    from fusebook.measure import inputs

    losses.padded = zeroed(losses.padded)
    exact, whole = torch.empty, roomy(torch.empty)
    numbered, after = [], 0
    for part in cases(words):
        part = [(after + i, case) for i, case in enumerate(part)]
        after += len(part)
        turn = len(part) * list(PLANTED).index(tool) // len(PLANTED)  # so that not all compile the same at once
        numbered += part[turn:] + part[:turn]
    for number, (op, name, dims, dtype) in numbered:
        try:
            os.close(os.open(taken / str(number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        print(f"{BEGUN}{said((op, name, dims, dtype))}", flush=True)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        torch.empty, unit = (whole, 16) if op.name in WHOLE else (exact, 1)
        # Made on the CPU: what is copied from there counts as written, and no kernel of others is looked at.
        made = op.make(inputs.generator(0, "cpu"), dtype, **dims)
        made = pytree.tree_map_only(torch.Tensor, functools.partial(placed, unit=unit), made)
        variant = op.variants[name]
        if variant.prepare:
            made = variant.prepare(*made)
            made = pytree.tree_map_only(torch.Tensor, functools.partial(placed, unit=unit), made)
        try:
            variant.run(*made)
        except NotImplementedError as refusal:
            print(f"refused: {refusal}")
        torch.cuda.synchronize()
        faulthandler.cancel_dump_traceback_later()
        print(DONE, flush=True)
        del made


# Around it


def sanitizer():
    """The program; the newest where CUDA is installed and not on the PATH."""
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not found:
        raise SystemExit("sanitize needs compute-sanitizer, which comes with CUDA's toolkit, on the PATH")
    return found


class Tool:
    """One of the sanitizer's tools: what it has to find, what it has looked at, and what it found."""

    def __init__(self, name, planned, words, until, folder):
        self.name, self.words, self.until = name, words, until
        self.planned, self.running, self.wrong = planned, 0, []
        self.taken = folder / name
        self.taken.mkdir()
        self.log = trials.Log.begin(f"compute-sanitizer, {name}", planned, f"sanitize_{name}", unit="cases")

    def left(self):
        """How many cases no process has taken."""
        return self.planned - len(os.listdir(self.taken))

    def lines(self, *arguments):
        """What a process prints under the tool, line by line; it is ended when time is up."""
        command = [sanitizer(), "--tool", self.name, "--print-limit", "2000", sys.executable, __file__, *arguments]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
            end = threading.Timer(max(1.0, self.until - time.monotonic()), os.killpg, (process.pid, signal.SIGKILL))
            end.start()
            yield from process.stdout
            process.wait()
            end.cancel()

    def plant(self):
        """Let it find what was planted for it."""
        lines = list(self.lines("--plant", self.name))
        seen = any(int(found[1]) for line in lines if (found := SUMMARY.match(line)))
        self.log.say(note=f"the planted {PLANTED[self.name][0]} is {'found' if seen else 'missed'}")
        if not seen:
            self.wrong.append(f"the planted {PLANTED[self.name][0]} is missed:\n{''.join(lines)[-1500:]}")

    def look(self):
        """Run cases in a process until none is left, or one ends it."""
        case, done, found, others = "before all cases", True, 0, []
        for line in self.lines("--look", self.name, str(self.taken), *self.words):
            if line.startswith(BEGUN):
                case, done, found, others = line.removeprefix(BEGUN).strip(), False, 0, []
            elif line.startswith(DONE):
                done = True
                self.log.came(case, "with findings" if found else "clean")
            elif line.startswith("=========") and line.strip("= \n") and not any(word in line for word in QUIET):
                found += 1
                if done:  # told late
                    self.log.came(case, "with findings")
                if found < 12:
                    self.wrong.append(f"{case}: {line.strip('= ').strip()}")
                    print(f"{self.name}: {self.wrong[-1]}", flush=True)
            else:
                others.append(line)
        if not done and time.monotonic() < self.until:
            self.log.came(case, "with findings")
            self.wrong.append(f"{case}: the process ended:\n{''.join(others)[-3000:]}")
            print(f"{self.name}: {self.wrong[-1]}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/sanitize.py", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="tools, and words of operators' names")
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=600, help="after which what is not done is cut off")
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    parser.add_argument("--look", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    words = [word for word in args.words if word not in PLANTED]
    if args.plant:
        return plant(args.plant)
    if args.look:
        return run(args.look[0], Path(args.look[1]), words)
    until = time.monotonic() + args.seconds
    planned = sum(map(len, cases(words)))
    with tempfile.TemporaryDirectory() as folder:
        named = [word for word in args.words if word in PLANTED] or PLANTED
        tools = [Tool(name, planned, words, until, Path(folder)) for name in named]
        changed = threading.Lock()

        def work(first):
            if first:
                first.plant()
            failures = 0
            while time.monotonic() < until and failures < 20:
                with changed:  # to the tool that is furthest behind; a few cases are not worth a start
                    tool = max(tools, key=lambda t: t.left() / (t.running + 1))
                    if tool.left() <= 3 * tool.running:
                        return
                    tool.running += 1
                before = tool.left()
                tool.look()
                failures += tool.left() == before
                with changed:
                    tool.running -= 1

        with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
            for job in [pool.submit(work, tools[i] if i < len(tools) else None) for i in range(args.processes)]:
                job.result()
        left = [f"{tool.name}: {tool.left()} cases were not begun" for tool in tools if tool.left()]
    for text in [*(f"{tool.name}: {text}" for tool in tools for text in tool.wrong), *left]:
        print(f"WRONG: {text}", flush=True)
    if not args.words:
        trials.tell([tool.log.path for tool in tools])
    return int(bool(left or any(tool.wrong for tool in tools)))


if __name__ == "__main__":
    raise SystemExit(main())
