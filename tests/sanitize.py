"""Every operator, strategy and edge under compute-sanitizer's four tools: ``nox -s sanitize``.

Each tool first has to find what was planted for it: a store behind the end of a tensor, a race between two warps, a
barrier that a warp meets in two halves, a load of what nobody wrote. Tensors have memory of their own, without a cache,
so that an access outside of one is outside of all. Processes run beside each other; each prints what it begins, and the
sanitizer prints what it finds between.

    python tests/sanitize.py                   # all, in at most ten minutes
    python tests/sanitize.py memcheck softmax  # a tool, and the operators whose names contain a word
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import time

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
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.M)
BEGUN = "-- run: "
QUIET = ("COMPUTE-SANITIZER", "SUMMARY", "Host Frame", "Saved host backtrace")


# Under the sanitizer


def plant(tool):
    import torch

    kernel = torch.cuda._compile_kernel(
        'extern "C" __global__ void planted(float* x, const float* y, int n) { ' + PLANTED[tool][1] + " }", "planted"
    )
    x, y = torch.zeros(64, device="cuda"), torch.empty(64, device="cuda")
    print(f"{BEGUN}planted {tool}", flush=True)
    kernel((1, 1, 1), (64, 1, 1), (x, y, 64))
    torch.cuda.synchronize()


def cases(words):
    """Each operator, variant of ours and edge, in a dtype: the next one for each edge."""
    from fusebook.cards import OPS

    for op in OPS.values():
        if words and not any(word in op.name for word in words):
            continue
        for name, variant in op.variants.items():
            if name.startswith("fusebook") and set(variant.needs) <= {"cuda"}:
                for i, dims in enumerate(op.edges):
                    yield op, name, variant, dims, op.dtypes[i % len(op.dtypes)]


def placed(t):
    """A tensor on the GPU, in memory of whole 16 bytes: rows are read by whole vectors, and no allocator gives less."""
    import torch

    bytes_ = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    memory = torch.zeros(-(-len(bytes_) // 16) * 16, dtype=torch.uint8)
    memory[: len(bytes_)] = bytes_
    place = t.storage_offset(), t.shape, t.stride()
    return torch.empty(0, dtype=t.dtype, device="cuda").set_(memory.cuda().untyped_storage(), *place)


def run(part, parts, words):
    import torch
    import torch.utils._pytree as pytree

    from fusebook import inputs

    for op, name, variant, dims, dtype in list(cases(words))[part::parts]:
        # Made on the CPU: what is copied from there counts as written, and no kernel of others is looked at.
        made = op.make(inputs.generator(0, "cpu"), dtype, **dims)
        made = pytree.tree_map_only(torch.Tensor, placed, made)
        print(f"{BEGUN}{op.name} {name} {dims} {dtype}", flush=True)
        try:
            variant.run(*(variant.prepare(*made) if variant.prepare else made))
        except NotImplementedError as refusal:
            print(f"refused: {refusal}")
        torch.cuda.synchronize()
        del made
    print("all done", flush=True)


# Around it


def sanitizer():
    """The program; the newest where CUDA is installed and not on the PATH."""
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not found:
        raise SystemExit("sanitize needs compute-sanitizer, which comes with CUDA's toolkit, on the PATH")
    return found


def looked(tool, *arguments, until):
    """What a process prints under a tool, and how many findings it ends with; -1 where it did not end well."""
    command = [sanitizer(), "--tool", tool, "--print-limit", "20", sys.executable, __file__, *map(str, arguments)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        said, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and what runs under it
        said, _ = process.communicate()
        return said + "\ncut off: there was no time left", -1
    summaries = SUMMARY.findall(said)
    whole = summaries and ("--plant" in arguments or "all done" in said)
    return said, int(summaries[-1]) if whole else -1


def report(said):
    """Of what was printed, the findings with the case in which each occurred."""
    begun, lines = "", []
    for line in said.splitlines():
        if line.startswith(BEGUN):
            begun = line
        elif line.startswith("=========") and not any(word in line for word in QUIET):
            if begun:
                lines.append(begun)
                begun = ""
            lines.append(line)
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/sanitize.py", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="tools, and words of operators' names")
    parser.add_argument("--processes", type=int, default=min(13, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=600, help="after which what is not done is cut off")
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    words = [word for word in args.words if word not in PLANTED]
    if args.plant:
        return plant(args.plant)
    if args.part:
        return run(*args.part, words)
    tools = [word for word in args.words if word in PLANTED] or list(PLANTED)
    start = time.monotonic()
    until = start + args.seconds
    wrong, came = [], {}
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        planted = {tool: pool.submit(looked, tool, "--plant", tool, until=until) for tool in tools}
        parts = {
            tool: [
                pool.submit(looked, tool, "--part", part, args.processes, *words, until=until)
                for part in range(args.processes)
            ]
            for tool in tools
        }
        for tool in tools:
            said, found = planted[tool].result()
            seen = found > 0
            if not seen:
                wrong.append(f"{tool} did not find the planted {PLANTED[tool][0]}:\n{said[-1500:]}")
            said, found = zip(*(part.result() for part in parts[tool]), strict=True)
            runs = sum(line.startswith(BEGUN) for text in said for line in text.splitlines())
            broken = sum(count < 0 for count in found)
            errors = sum(count for count in found if count > 0)
            for text, count in zip(said, found, strict=True):
                if count:
                    wrong.append(f"{tool}:\n{report(text)[:6000] or text[-1500:]}")
            came[f"compute-sanitizer, {tool}"] = (
                f"{runs} runs, {errors} findings; the planted {PLANTED[tool][0]} is {'found' if seen else 'missed'}"
                + (f"; {broken} of {args.processes} processes did not end" if broken else "")
            )
            print(came[f"compute-sanitizer, {tool}"], f"after {time.monotonic() - start:.0f} s", flush=True)
    for text in wrong:
        print(f"WRONG: {text}", flush=True)
    if not args.words:
        trials.tell(came, time.monotonic() - start)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
