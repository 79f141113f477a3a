"""`fusebook.launches.elsewhere`, whose processes are forked off one that has imported torch and Triton already.

Importing them takes longer than what most tests ask. Run as a script, this is the process that forks; it knows nothing
of Fusebook, of which each of its children imports the copy that it is asked about. It ends with the tests.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1] / "src"


def elsewhere(
    asked, capability, multiprocessors, compile=False, triton="", cards="fusebook.cards:OPS", library=LIBRARY
):
    """As `launches.elsewhere`, by the Triton of the tests."""
    from fusebook.launches import Unknown

    given = {"capability": capability, "sms": multiprocessors, "compile": compile, "triton": triton, "asked": asked}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in").write_text(json.dumps(given))
        print(json.dumps([folder, str(library), cards]), file=process().stdin, flush=True)
        assert process().stdout.readline(), "the process that forks has ended"
        if error := Path(folder, "err").read_text():
            raise Unknown(error.strip().splitlines()[-1])
        answers = {}
        for line in Path(folder, "out").read_text().splitlines():
            answers |= json.loads(line)
    return {name: [tuple(pair) for pair in pairs] for name, pairs in answers.items()}


@functools.cache
def process():
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__]
    forking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(forking.communicate)  # ends it
    return forking


def answer(folder, library, cards):
    """Do what `elsewhere` asks, in a process of its own."""
    sys.path.insert(0, library)
    sys.stdin, sys.stdout = open(f"{folder}/in"), open(f"{folder}/out", "w")
    with open(f"{folder}/err", "w") as error:
        try:
            from fusebook import launches

            launches.main([cards])
        except BaseException:
            error.write(traceback.format_exc())
    sys.stdout.close()


if __name__ == "__main__":
    import torch._dynamo
    from triton.runtime.cache import triton_key

    triton_key()  # reads all of Triton
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            answer(*json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)
        print("done", flush=True)
