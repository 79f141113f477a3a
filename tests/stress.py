"""Kernels that wait for each other, count each other or start early, a hundred thousand times: ``nox -s stress``.

Each case runs in a CUDA graph of many calls, every call into memory that was spoiled first, and is compared with its
first result: bit by bit, or within some roundings where sums come in the order of the hardware. It runs by itself,
while another stream writes memory, while a kernel holds all but a multiprocessor's worth of the GPU's threads, and
beside itself on another stream, a quarter of the calls each; and another process shares the GPU meanwhile. What does
not end is ended by a watchdog, with the operator's name.

    python tests/stress.py                              # all
    python tests/stress.py softmax --calls 1000         # operators whose names contain a word
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import trials

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
    ("cross_entropy", "fusebook", "bfloat16", {"M": 8, "N": 262144}),
    ("cross_entropy", "fusebook", "float32", {"M": 64, "N": 100003}),
    ("rms_norm", "fusebook", "bfloat16", {"M": 8, "N": 262144}),
    ("rms_norm", "fusebook", "float32", {"M": 64, "N": 65536}),
    ("layer_norm", "fusebook", "bfloat16", {"M": 64, "N": 65536}),
    ("rms_norm_backward", "fusebook", "bfloat16", {"M": 64, "N": 65536}),
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
    # A count of steps on the device, which the last program to take a ticket advances.
    ("adamw_step", "counted", "float32", {"numbers": 200_000, "tensors": 30, "sizes": "uneven", "kind": "plain"}),
]
HOLD = """
extern "C" __global__ void hold(int cycles) {
    long long start = clock64();
    while (clock64() - start < cycles);
}
"""


@contextlib.contextmanager
def watched(number, seconds):
    """End the process with a case where what is inside takes longer; a kernel that hangs cannot be ended otherwise."""

    def end():
        print(json.dumps({"number": number, "outcome": "hangs", "n": 0, "why": f"after {seconds:.0f} s"}), flush=True)
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


def counted(p, g, m, v, extra, widths, kind, step, lr):
    """A step of AdamW on copies of what it is given, whose number is counted on the device."""
    import torch

    from fusebook import adamw_step

    ps, gs, ms, vs = ([part.clone() for part in t.split(widths)] for t in (p, g, m, v))
    count = torch.full((), step - 1, dtype=torch.int64, device="cuda")
    adamw_step(ps, gs, ms, vs, step=count, lr=lr)
    return torch.cat(ps), torch.cat(ms), torch.cat(vs), count


def case(op, name, dtype, dims, calls, seconds):
    """Run a case in each of the ways; returns what it came to, and how many calls it took."""
    import torch
    import torch.utils._pytree as pytree

    from fusebook import inputs
    from fusebook.cards import OPS
    from fusebook.op import Variant

    variant = OPS[op].variants.get(name) or Variant(counted)
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

    graphs, side, done, said = [captured(), captured()], torch.cuda.Stream(), 0, []
    ways = ("alone", "beside writes", "held", "beside itself")
    for i, how in enumerate(ways):
        disturb = graphs[1].replay if how == "beside itself" else disturber(how)
        idle = torch.cuda.Event()
        began, before = time.monotonic(), done
        while done < calls * (i + 1) // len(ways) and time.monotonic() - began < seconds:
            if disturb and idle.query():
                with torch.cuda.stream(side):
                    disturb()
                    idle.record()
            graphs[0].replay()
            torch.cuda.current_stream().synchronize()
            done += MANY
        torch.cuda.synchronize()
        said.append(f"{done - before} {how} in {time.monotonic() - began:.1f} s")
        if count := int(wrong):
            return f"differs {how}", done, f"{count} results of {done} calls differ"
    return "same" if done >= calls else f"same, in fewer than {calls} calls", done, "; ".join(said)


def child(numbers, calls, seconds):
    """Run cases by their numbers and print a line for each."""
    for number in numbers:
        with watched(number, 120 + 4 * seconds):
            try:
                outcome, n, why = case(*CASES[number], calls, seconds)
            except Exception as error:  # a GPU that an error has stopped does nothing more for this process
                outcome, n, why = "fails", 0, f"{type(error).__name__}: {error}"[:800]
        print(json.dumps({"number": number, "outcome": outcome, "n": n, "why": why}), flush=True)
        if outcome == "fails":
            return 1
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/stress.py", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="words of operators' names; all by default")
    parser.add_argument("--calls", type=int, default=100_000, help="of each case")
    parser.add_argument("--each", type=float, default=60, help="seconds after which a way of a case is cut short")
    parser.add_argument("--seconds", type=float, default=3600, help="after which what is not done is cut off")
    parser.add_argument("--processes", type=int, default=2, help="that share the GPU by slices of time")
    parser.add_argument("--child", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return child(args.child, args.calls, args.each)
    chosen = [i for i, c in enumerate(CASES) if not args.words or any(word in c[0] for word in args.words)]
    log = trials.Log.begin("Stress: kernels that wait, count or start early", len(chosen), "stress", unit="calls")
    if not args.words:
        log.say(note=f"{args.processes} processes share the GPU")
    until = time.monotonic() + args.seconds
    bad, left = [], len(chosen)
    lines = queue.SimpleQueue()

    def serve(numbers):
        """Run cases in a process, and those behind one that ended it in another."""
        while numbers and time.monotonic() < until:
            before = len(numbers)
            options = ["--calls", str(args.calls), "--each", str(args.each), "--child", *map(str, numbers)]
            command = [sys.executable, __file__, *options]
            pipe = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
            with subprocess.Popen(command, **pipe) as process:
                end = threading.Timer(until - time.monotonic(), os.killpg, (process.pid, signal.SIGKILL))
                end.start()
                for line in process.stdout:
                    found = json.loads(line)
                    numbers.remove(found["number"])
                    lines.put(found)
                end.cancel()
            if len(numbers) == before and time.monotonic() < until:  # it died without a line
                why = f"ended with {process.returncode}"
                lines.put({"number": numbers.pop(0), "outcome": "fails", "n": 0, "why": why})

    threads = [threading.Thread(target=serve, args=(chosen[i :: args.processes],)) for i in range(args.processes)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not lines.empty():
        try:
            found = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        left -= 1
        name = " ".join(map(str, CASES[found["number"]]))
        log.came(name, found["outcome"], n=found["n"])
        bad += [name] if found["outcome"] != "same" else []
        print(f"{found['outcome']} {found['n']} {name}: {found['why']}", flush=True)
    if not args.words:
        trials.tell([log.path])
    return int(bool(bad or left))


if __name__ == "__main__":
    raise SystemExit(main())
