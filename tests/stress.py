"""Kernels that wait for each other, count each other or start early, a hundred thousand times: ``nox -s stress``.

Each case runs in a CUDA graph of many calls, every call into memory that was spoiled first, and is compared with its
first result: bit by bit, or within some roundings where sums come in the order of the hardware. It runs by itself,
while another stream writes memory, while a kernel holds all but a multiprocessor's worth of the GPU's threads, and
beside itself on another stream. What does not end is ended by a watchdog, with the operator's name.

    python tests/stress.py                              # all
    python tests/stress.py softmax --seconds 1          # operators whose names contain a word, a second for each way
"""

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time

import trials

CALLS = 100_000
#: Calls in a graph.
MANY = 50
SKEWED = {"R": 1024, "D": 2048, "n": 2048}
#: Operator, variant, dtype and sizes.
CASES = [
    # Parts of a row that wait for each other's words, and start before their board is cleared.
    ("softmax", "fusebook", "bfloat16", {"M": 8, "N": 131072}),
    ("softmax", "fusebook", "float32", {"M": 64, "N": 100003}),
    ("softmax_backward", "fusebook", "bfloat16", {"M": 8, "N": 131072}),
    ("softmax_backward", "fusebook", "float32", {"M": 64, "N": 100003}),
    # Counters of pieces, of which the last adds the others up; kernels that start beside the one ahead.
    ("masked_scatter_nd_of_shape", "fusebook sorted", "float32", SKEWED | {"law": "zipf"}),
    ("masked_scatter_nd_of_shape", "fusebook sorted", "float16", SKEWED | {"law": "equal"}),
    ("masked_scatter_nd_of_shape", "fusebook atomic", "float32", SKEWED | {"law": "zipf"}),
    ("masked_scatter_nd_of_shape", "fusebook owner", "float32", SKEWED | {"law": "equal"}),
    ("embedding_backward", "fusebook sorted", "bfloat16", {"R": 4096, "D": 64, "n": 8192, "law": "zipf"}),
    # Sums over a cut K, of which the last program adds up the others'; kernels that take over early.
    ("concat_gemm", "fusebook", "bfloat16", {"M": 8, "K": 4096, "N": 1024, "weights": "columns"}),
    ("concat_gemm", "fusebook", "bfloat16", {"M": 256, "K": 512, "N": 256, "weights": "two"}),
    ("swiglu", "fusebook", "bfloat16", {"M": 1, "K": 4096, "N": 2816}),
    ("swiglu", "fusebook", "bfloat16", {"M": 32, "K": 4096, "N": 2816}),
    # Steps that wait for the words of all programs.
    ("logistic_fit", "fusebook", "float32", {"N": 400, "D": 784, "steps": 20}),
    # Lists of points in doubt, and sums of blocks.
    ("kmeans_assign", "fusebook", "float32", {"n": 20000, "d": 64, "k": 64, "labels": "int64", "law": "near"}),
    ("kmeans_update", "fusebook", "float32", {"n": 20000, "d": 20, "k": 64, "labels": "int64", "law": "skewed"}),
    ("kmeans_step", "fusebook", "float32", {"n": 20000, "d": 2, "k": 2, "labels": "int64", "law": "blobs"}),
]
HOLD = """
extern "C" __global__ void hold(int cycles) {
    long long start = clock64();
    while (clock64() - start < cycles);
}
"""


@contextlib.contextmanager
def watched(what, seconds):
    """End the process with a name where what is inside takes longer; a kernel that hangs cannot be ended otherwise."""

    def end():
        print(f"HANGS: {what}, after {seconds:.0f} s", flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def differs(found, first, exact):
    """Whether a result is another, as a tensor of one number; then spoil it."""
    import torch

    if exact:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
        other = (found.contiguous().view(whole) != first.view(whole)).any()
    else:
        limit = 64 * torch.finfo(found.dtype).eps * first.abs().max()
        other = ~((found - first).abs() <= limit).all()
    found.fill_(float("nan") if found.is_floating_point() else 113)
    return other


def disturber(how):
    """What another stream does meanwhile: a function that queues some of it, or None."""
    import torch

    if how == "beside writes":
        memory = torch.empty(2**26, device="cuda")
        return lambda: [memory.fill_(float(i)) for i in range(20)]
    if how == "held":
        held = torch.cuda._compile_kernel(HOLD, "hold")
        blocks = 2 * (torch.cuda.get_device_properties(0).multi_processor_count - 1)  # of half its threads each
        return lambda: held((blocks, 1, 1), (1024, 1, 1), (10_000_000,))  # cycles, some milliseconds
    return None


def case(op, name, dtype, dims, seconds):
    """Run a case in each of the ways; returns calls, and what differed."""
    import torch
    import torch.utils._pytree as pytree

    from fusebook import inputs
    from fusebook.cards import OPS

    variant = OPS[op].variants[name]
    made = OPS[op].make(inputs.generator(0), getattr(torch, dtype), **dims)
    made = variant.prepare(*made) if variant.prepare else made
    exact = "atomic" not in name and "owner" not in name

    def run():
        return [t for t in pytree.tree_leaves(variant.run(*made)) if isinstance(t, torch.Tensor)]

    run()
    first = [t.clone() for t in run()]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()

    def captured():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(MANY):
                for found, right in zip(run(), first, strict=True):
                    wrong.add_(differs(found, right, exact))
        return graph

    graphs, side, calls, said = [captured(), captured()], torch.cuda.Stream(), 0, []
    for how in ("alone", "beside writes", "held", "beside itself"):
        disturb = graphs[1].replay if how == "beside itself" else disturber(how)
        idle = torch.cuda.Event()
        began, done = time.monotonic(), 0
        while done < CALLS and time.monotonic() - began < seconds:
            if disturb and idle.query():
                with torch.cuda.stream(side):
                    disturb()
                    idle.record()
            graphs[0].replay()
            torch.cuda.current_stream().synchronize()
            done += MANY
        torch.cuda.synchronize()
        said.append(f"{how} {done} in {time.monotonic() - began:.1f} s")
        calls += done
        if count := int(wrong):
            return calls, f"{count} results differ {how}", said
    return calls, "", said


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/stress.py", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="words of operators' names; all by default")
    parser.add_argument("--seconds", type=float, default=10, help=f"of each way, or {CALLS} calls")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=2, help="that share the GPU by slices of time")
    args = parser.parse_args(argv)
    chosen = [c for c in CASES if not args.words or any(word in c[0] for word in args.words)]
    if args.part is not None:
        wrong = 0
        for op, name, dtype, dims in chosen[args.part :: args.processes]:
            what = f"{op} {name} {dtype} {dims}"
            with watched(what, 120 + 8 * args.seconds):
                try:
                    calls, differed, said = case(op, name, dtype, dims, args.seconds)
                except Exception as error:
                    calls, differed, said = 0, f"{type(error).__name__}: {error}"[:500], []
            wrong += bool(differed)
            print(f"{'WRONG' if differed else 'same'} {calls} {what}: {differed or '; '.join(said)}", flush=True)
        return wrong
    start = time.monotonic()
    command = [sys.executable, __file__, *args.words, "--seconds", str(args.seconds)]
    command += ["--processes", str(args.processes)]
    running = [
        subprocess.Popen([*command, "--part", str(i)], stdout=subprocess.PIPE, text=True) for i in range(args.processes)
    ]
    lines = [line for process in running for line in _shown(process)]
    codes = [process.wait() for process in running]
    same = [line.split() for line in lines if line.startswith("same ")]
    hangs = sum(line.startswith("HANGS") for line in lines)
    wrong = len(chosen) - len(same) - hangs
    if not args.words:
        calls = sum(int(words[1]) for words in same)
        came = f"{len(chosen)} cases, {calls} calls: {hangs} hang, {wrong} differ or fail"
        trials.tell({"Stress: kernels that wait, count or start early": came}, time.monotonic() - start)
    return int(any(codes) or len(same) != len(chosen))


def _shown(process):
    for line in process.stdout:
        print(line, end="", flush=True)
        yield line


if __name__ == "__main__":
    raise SystemExit(main())
