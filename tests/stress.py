"""Kernels that wait for each other, count each other or start early, a hundred thousand times: ``nox -s stress``.

Each case runs in a CUDA graph of many calls, every call into memory that was spoiled first, and is compared on the
device with its first result: bit by bit, or within some roundings where sums come in the order of the hardware. It runs
while a kernel holds all but a multiprocessor's worth of the GPU's threads and lets go of them one after the other,
while another stream writes memory, beside itself on another stream, and by itself; and other processes share the GPU
meanwhile, by turns, or all at once where NVIDIA's multi-process service (MPS) runs. What does not end is ended by a
watchdog, with the operator's name. A race that is planted has to be found: programs that trust that the one beside them
has run by now.

    python tests/stress.py                              # all
    python tests/stress.py softmax --calls 1000         # operators whose names contain a word
    python tests/stress.py --mps --calls 10000          # processes at once; a service is started and ended
"""

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import trials

#: Calls in a graph.
MANY = 200
#: Graphs that are queued before the host waits for the first of them.
AHEAD = 4
SKEWED = {"R": 1024, "D": 2048, "n": 2048}
#: Of these the sums are judged within roundings, which takes longer than to add them.
FEW = {"R": 256, "D": 512, "n": 2048}
#: Operator, variant, dtype and sizes.
CASES = [
    # Parts of a row that wait for each other's words, and start before their board is cleared.
    ("softmax", "fusebook", "bfloat16", {"M": 8, "N": 131072}),
    ("softmax", "fusebook", "float32", {"M": 32, "N": 100003}),
    ("softmax_backward", "fusebook", "bfloat16", {"M": 8, "N": 131072}),
    ("softmax_backward", "fusebook", "float32", {"M": 32, "N": 100003}),
    ("softmax", "fusebook", "bfloat16", {"M": 64, "N": 50304}),
    ("softmax_backward", "fusebook", "bfloat16", {"M": 64, "N": 50304}),
    ("cross_entropy", "fusebook", "bfloat16", {"M": 8, "N": 262144}),
    ("cross_entropy", "fusebook", "float32", {"M": 32, "N": 100003}),
    ("rms_norm", "fusebook", "bfloat16", {"M": 8, "N": 262144}),
    ("rms_norm", "fusebook", "float32", {"M": 64, "N": 65536}),
    ("layer_norm", "fusebook", "bfloat16", {"M": 64, "N": 65536}),
    ("layer_norm_backward", "fusebook", "bfloat16", {"M": 64, "N": 65536}),
    ("rms_norm_backward", "fusebook", "bfloat16", {"M": 64, "N": 65536}),
    # Partial rows, which the next kernel waits for.
    ("rms_norm_backward", "fusebook", "bfloat16", {"M": 3000, "N": 260}),
    # Counters of pieces, of which the last adds the others up; kernels that start beside the one ahead.
    ("masked_scatter_nd_of_shape", "fusebook sorted", "float32", SKEWED | {"law": "zipf"}),
    ("masked_scatter_nd_of_shape", "fusebook sorted", "float16", SKEWED | {"law": "equal"}),
    ("masked_scatter_nd_of_shape", "fusebook atomic", "float32", FEW | {"law": "zipf"}),
    ("masked_scatter_nd_of_shape", "fusebook owner", "float32", FEW | {"law": "equal"}),
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
#: The number of the planted race, behind those of the cases.
PLANTED = len(CASES)
#: How a case runs, and its share of the calls: there are few while the GPU is held. The last makes up for the others.
WAYS = {"held": 0.04, "beside writes": 0.32, "beside itself": 0.32, "alone": 0.32}
#: Each block for a time of its own, another one each time. It counts steps: the clock goes on while others have a turn.
HOLD = """
extern "C" __global__ void hold(int steps, int turn, unsigned* never) {
    unsigned x = (blockIdx.x + 977u * turn) * 2654435761u, least = steps / 2 + steps / 2 * (x >> 16) / 65536;
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < least; i++) x = (x ^ (x >> 13)) * 1664525u + 1013904223u;
        if (x == 0 && turn < 0) *never = x;
    }
    __syncthreads();
}
"""
#: A race: each block leaves a word and reads its neighbour's, which it trusts to be there soon. Alone it always is.
RACE = """
extern "C" __global__ void race(unsigned* board, unsigned* found) {
    if (threadIdx.x == 0) {
        atomicExch(board + blockIdx.x, 1u + blockIdx.x);
        long long start = clock64();
        while (clock64() - start < 20000);
        found[blockIdx.x] = atomicAdd(board + (blockIdx.x + 1) % gridDim.x, 0u);
    }
}
"""
#: Counts words that are not as they were, and spoils them: one launch, where torch takes four.
JUDGE = """
extern "C" __global__ void judge(unsigned* found, const unsigned* right, unsigned long long* wrong, int words) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        if (found[i] != right[i]) atomicAdd(wrong, 1ull);
        found[i] = 0x7fffffffu;  // NaN, of two halves as well
    }
}
"""
#: The same of float32 numbers whose sums come in any order, within a limit.
NEAR = """
extern "C" __global__ void near(float* found, const float* right, unsigned long long* wrong, float* limit, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        if (!(fabsf(found[i] - right[i]) <= *limit)) atomicAdd(wrong, 1ull);
        found[i] = nanf("");
    }
}
"""


@contextlib.contextmanager
def watched(number, seconds):
    """End the process with a case that does not go on for so long; a kernel that hangs cannot be ended otherwise.

    Gives the function that tells that it goes on.
    """
    told, over = [time.monotonic()], threading.Event()

    def watch():
        while not over.wait(0.5):
            if time.monotonic() - told[0] > seconds:
                why = f"no end of {MANY} calls in {seconds:.0f} s"
                print(json.dumps({"number": number, "outcome": "hangs", "n": 0, "why": why}), flush=True)
                os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield lambda: told.__setitem__(0, time.monotonic())
    finally:
        over.set()


@functools.cache
def kernel(name):
    import torch

    return torch.cuda._compile_kernel({"hold": HOLD, "judge": JUDGE, "near": NEAR, "race": RACE}[name], name)


def judge(found, right, wrong, limit):
    """Add to a number on the device what of a result is another than it was; then spoil it.

    The limit is a number on the device, or None where every bit counts.
    """
    import torch

    if found.is_contiguous() and found.nbytes % 4 == 0:
        words = found.nbytes // 4
        size = (min(1056, -(-words // 256)), 1, 1), (256, 1, 1)
        if limit is None:
            kernel("judge")(*size, (found, right, wrong, words))
        else:
            kernel("near")(*size, (found, right, wrong, limit, words))
        return
    assert limit is None, "sums of any order are contiguous numbers of float32"
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    wrong += (found.contiguous().view(whole) != right.view(whole)).sum()
    found.fill_(float("nan") if found.is_floating_point() else 113)


def disturber(how):
    """What another stream does meanwhile: a function that queues some of it, or None."""
    import torch

    if how == "beside writes":
        memory = torch.empty(2**26, device="cuda")
        return lambda: [memory.fill_(float(i)) for i in range(10)]
    if how == "held":
        blocks = 2 * (torch.cuda.get_device_properties(0).multi_processor_count - 1)  # of half its threads each
        turns, never = itertools.count(), torch.zeros(1, device="cuda", dtype=torch.int32)
        steps = 60_000  # a millisecond at most
        return lambda: [
            kernel("hold")((blocks, 1, 1), (1024, 1, 1), (steps, next(turns) % 4096, never)) for _ in range(50)
        ]
    return None


def counting(p, g, m, v, extra, widths, kind, step, lr):
    """A step of AdamW of a list that stays where it is, from the same numbers each time, counted on the device."""
    import torch

    from fusebook import adamw_step

    states = [torch.empty_like(t) for t in (p, m, v)]
    ps, ms, vs = (t.split(widths) for t in states)
    gs, count = g.split(widths), torch.zeros((), dtype=torch.int64, device=p.device)

    def run():
        for mine, t in zip(states, (p, m, v), strict=True):
            torch.mul(t, 1, out=mine)  # a copy would be another engine's, and others would have a turn meanwhile
        count.fill_(step - 1)
        adamw_step(ps, gs, ms, vs, step=count, lr=lr)
        return [*states, count]

    return run


def problem(number):
    """A function that calls what a case calls, and returns its tensors; and whether every bit of them counts."""
    import torch
    import torch.utils._pytree as pytree

    from fusebook.cards import OPS
    from fusebook.measure import inputs

    if number == PLANTED:

        def race():
            board, found = (torch.zeros(512, dtype=torch.int32, device="cuda") for _ in range(2))
            kernel("race")((512, 1, 1), (32, 1, 1), (board, found))
            return [found]

        return race, True
    op, name, dtype, dims = CASES[number]
    made = OPS[op].make(inputs.generator(0), getattr(torch, dtype), **dims)
    if name == "counted":
        return counting(*made), True
    variant = OPS[op].variants[name]
    made = variant.prepare(*made) if variant.prepare else made

    def run():
        return [t for t in pytree.tree_leaves(variant.run(*made)) if isinstance(t, torch.Tensor)]

    return run, "atomic" not in name and "owner" not in name


def case(number, calls, seconds, until, goes_on):
    """Run a case in each of the ways; returns what it came to, and how many calls it took."""
    import torch

    run, exact = problem(number)
    run()
    first = [t.clone(memory_format=torch.contiguous_format) for t in run()]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    limit = None if exact else 64 * torch.finfo(torch.float32).eps * first[0].abs().max()
    for right in first:  # against itself, so that what judges is compiled; then a planted mistake is to be found
        judge(right.clone(), right, wrong, limit)
    assert not int(wrong)
    other = torch.full_like(first[0], float("nan") if first[0].is_floating_point() else 113)
    judge(other, first[0], wrong, limit)
    assert int(wrong)
    wrong.zero_()
    torch.cuda.synchronize()
    # Ahead of what disturbs, so that programs start as that leaves them room, one after the other.
    stream, side, apart = (torch.cuda.Stream(priority=priority) for priority in (-1, -1, 0))

    def captured():
        run, _ = problem(number)  # with memory of its own
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(MANY):
                for found, right in zip(run(), first, strict=True):
                    judge(found, right, wrong, limit)
        return graph, run

    steps = [captured(), captured()]  # and what they read, which goes with the function that holds it
    graphs, done, said, planned = [graph for graph, _ in steps], 0, [], 0
    for how, share in WAYS.items():
        last = how == "alone"
        planned = calls if last else planned + round(calls * share)
        disturb = graphs[1].replay if how == "beside itself" else disturber(how)
        torch.cuda.synchronize()
        idle, queued = torch.cuda.Event(), collections.deque()
        began, before = time.monotonic(), done
        end = until if last else min(until, began + seconds)
        while done < planned and time.monotonic() < end:
            if disturb and idle.query():
                with torch.cuda.stream(side if how == "beside itself" else apart):
                    disturb()
                    idle.record()
                done += MANY if how == "beside itself" else 0
            with torch.cuda.stream(stream):
                graphs[0].replay()
                queued.append(torch.cuda.Event())
                queued[-1].record()
            done += MANY
            if len(queued) > AHEAD:
                queued.popleft().synchronize()
                goes_on()
        torch.cuda.synchronize()
        said.append(f"{done - before} {how} in {time.monotonic() - began:.1f} s")
        if count := int(wrong):
            return f"differs {how}", done, f"{count} words of {done} calls differ"
    return "same" if done >= calls else f"same, in fewer than {calls} calls", done, "; ".join(said)


def child(calls, seconds, until, hangs):
    """Run cases, whose numbers are asked for one at a time, and print a line for each."""
    print("{}", flush=True)
    for line in sys.stdin:
        number = int(line)
        with watched(number, hangs) as goes_on:
            try:
                outcome, n, why = case(number, calls, seconds, until, goes_on)
            except Exception as error:  # a GPU that an error has stopped does nothing more for this process
                outcome, n, why = "fails", 0, f"{type(error).__name__}: {error}"[:800]
        print(json.dumps({"number": number, "outcome": outcome, "n": n, "why": why}), flush=True)
        if outcome == "fails":
            return 1
    return 0


@contextlib.contextmanager
def served(folder):
    """The environment of processes that share a GPU at once, by a service that runs meanwhile, or why there is none."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not control:
        yield None, "nvidia-cuda-mps-control is not installed"
        return
    ours = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for name in ("pipe", "log"):
        os.mkdir(f"{folder}/{name}")
    # The service sees the GPU that is chosen, and its clients the service's first.
    theirs = ours | ({"CUDA_VISIBLE_DEVICES": "0"} if os.environ.get("CUDA_VISIBLE_DEVICES", "").isdigit() else {})
    quiet = {"capture_output": True, "text": True, "timeout": 30}
    try:
        begun = subprocess.run([control, "-d"], env=ours, **quiet)
        one = "import torch; print(int(torch.ones(3, device='cuda').sum()))"
        tried = subprocess.run([sys.executable, "-c", one], env=theirs, **quiet)
        served_by = subprocess.run([control], env=ours, input="get_server_list\n", **quiet)
        why = ""
        if begun.returncode or tried.stdout.strip() != "3" or not served_by.stdout.strip().isdigit():
            said = (begun.stderr or begun.stdout, tried.stderr or tried.stdout, served_by.stderr or served_by.stdout)
            why = next((text.strip().splitlines()[-1] for text in said if text.strip()), "no server was started")
        yield (None, f"MPS cannot be had: {why[:200]}") if why else (theirs, "")
    except (OSError, subprocess.SubprocessError) as error:
        yield None, f"MPS cannot be had: {error}"[:200]
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([control], env=ours, input="quit -t 5\n", **quiet)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python tests/stress.py", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="words of operators' names; all by default")
    parser.add_argument("--calls", type=int, default=100_000, help="of each case")
    parser.add_argument("--each", type=float, default=60, help="seconds after which a way of a case is cut short")
    parser.add_argument("--seconds", type=float, default=3600, help="after which what is not done is cut off")
    parser.add_argument("--processes", type=int, default=2, help="that share the GPU by slices of time")
    parser.add_argument("--mps", action="store_true", help="share it at once")
    parser.add_argument("--hangs", type=float, default=120, help="seconds that a graph may take, or what is compiled")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return child(args.calls, args.each, args.child, args.hangs)
    if not args.mps:
        return stressed(args, "Stress: kernels that wait, count or start early", "stress", None)
    name = "Stress of the same, processes at once by MPS"
    with tempfile.TemporaryDirectory() as folder, served(folder) as (environment, why):
        if environment:
            return stressed(args, name, "stress_mps", environment)
    log = trials.Log.begin(name, None, "stress_mps", unit="calls")
    log.say(note=why)
    if not args.words:
        trials.tell([log.path])
    return 0


def named(number):
    """What a log calls a case."""
    return "planted race" if number == PLANTED else " ".join(map(str, CASES[number]))


def stressed(args, trial, file, environment):
    """Run the chosen cases in processes of an environment, and tell what each came to; returns the exit code."""
    chosen = [i for i, c in enumerate(CASES) if not args.words or any(word in c[0] for word in args.words)]
    log = trials.Log.begin(trial, len(chosen), file, unit="calls")
    if not args.words:
        log.say(note=f"{args.processes} processes share the GPU")
    until = time.monotonic() + args.seconds
    bad, left = [], len(chosen)
    waiting, lines = queue.SimpleQueue(), queue.SimpleQueue()
    for number in [PLANTED, *chosen]:
        waiting.put(number)

    def serve():
        """Run cases in a process, one behind the other, and those behind one that ended it in another process."""
        while not waiting.empty() and time.monotonic() < until:
            options = {"--calls": args.calls, "--each": args.each, "--hangs": args.hangs, "--child": until}
            command = [sys.executable, __file__, *(str(word) for option in options.items() for word in option)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
            number = None
            with subprocess.Popen(command, **pipes, env=environment) as process:
                # What ends in time says itself that it was cut short.
                end = threading.Timer(until + args.hangs - time.monotonic(), os.killpg, (process.pid, signal.SIGKILL))
                end.start()
                for line in process.stdout:
                    found = json.loads(line)
                    if found:  # it is empty when the process is ready for its first case
                        lines.put(found)
                    number = None
                    if found.get("outcome") in ("fails", "hangs") or time.monotonic() > until:
                        break
                    try:
                        number = waiting.get_nowait()
                        print(number, file=process.stdin, flush=True)
                    except (queue.Empty, BrokenPipeError):
                        break
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                process.wait()
                end.cancel()
            if number is not None:  # it died without a line
                lines.put({"number": number, "outcome": "fails", "n": 0, "why": f"ended with {process.returncode}"})

    threads = [threading.Thread(target=serve) for _ in range(args.processes)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not lines.empty():
        try:
            found = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        name, well = named(found["number"]), found["outcome"] == "same"
        if found["number"] == PLANTED:
            well = found["outcome"].startswith("differs")
            log.say(note=f"the planted race is {'found' if well else 'not found'}")
        else:
            left -= 1
            log.came(name, found["outcome"], n=found["n"])
        bad += [] if well else [name]
        print(f"{found['outcome']} {found['n']} {name}: {found['why']}", flush=True)
    if not args.words:
        trials.tell([log.path])
    return int(bool(bad or left))


if __name__ == "__main__":
    raise SystemExit(main())
