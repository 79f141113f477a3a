"""Python processes that need not import torch and Triton first, which takes longer than what most tests ask of them.

`run` is `subprocess.run` of Python's own command line, done by a fork of a process that has imported both already and
knows nothing of Fusebook: a fork imports the library that its PYTHONPATH names. What an interpreter does as it begins
and ends is tested with processes of their own.

Run as a script, this is the process that forks; it ends with the tests.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from pathlib import Path

#: What else is imported beforehand, by the module that is run. A process that compiles asks for what takes longest.
ALSO = {
    "compiles": ("torch._dynamo", "triton.compiler", "triton.backends.nvidia.compiler"),
    "sphinx": ("sphinx.cmd.build", "sphinx_gallery.gen_gallery", "matplotlib.pyplot", "pandas", "numpydoc"),
}

ONE_AT_A_TIME = threading.Lock()


def run(*words, env=None, cwd=None, input="", core=None, limit=None):
    """What ``python`` with these words said, and how it ended.

    Parameters
    ----------
    *words : str
        Such as ``-m module``, ``-c code`` or the path of a script, and their arguments.
    env : mapping of str to str, optional
        The environment; of the tests by default.
    cwd : path, optional
        The folder that it works in.
    input : str
        What it reads from standard input.
    core : int, optional
        The only core that it may use.
    limit : int, optional
        The bytes of the longest file that it may write; a write beyond fails, as on a full disk.
    """
    env = dict(os.environ if env is None else env)
    also = "sphinx" if "sphinx" in words[:4] else "compiles" if env.get("TRITON_INTERPRET") == "0" else ""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in").write_text(input)
        asked = {"words": words, "env": env, "cwd": str(cwd or os.getcwd()), "core": core, "limit": limit}
        with ONE_AT_A_TIME:
            forking = _process(also, env.get("TRITON_INTERPRET"), env.get("LC_ALL"))
            print(json.dumps(asked | {"folder": folder}), file=forking.stdin, flush=True)
            code = forking.stdout.readline()
        assert code, "the process that forks has ended"
        said = [Path(folder, name).read_text(errors="replace") for name in ("out", "err")]
    return subprocess.CompletedProcess([sys.executable, *words], int(code), *said)


@functools.cache
def _process(also, interpreted, language):
    """The process that forks: whether kernels are interpreted is settled as Triton is imported."""
    settled = {"TRITON_INTERPRET": interpreted, "LC_ALL": language, "OMP_NUM_THREADS": "1"}
    environment = os.environ | {name: value for name, value in settled.items() if value is not None}
    command = [sys.executable, __file__, *ALSO.get(also, ())]
    forking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(forking.communicate)  # ends it
    return forking


def _become(words, env, cwd, core, limit, folder):
    """Make of this process, a fork, what the command line would have made; returns its exit code."""
    for stream, name, flags in ((0, "in", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        os.dup2(os.open(f"{folder}/{name}", flags | os.O_CREAT), stream)
    sys.stdin = open(0, closefd=False)  # the other one may have read ahead
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if core is not None:
        os.sched_setaffinity(0, {core})
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [os.path.abspath(path) for path in paths]
    try:
        _execute(*words)
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _execute(first, *words):
    if first == "-W":
        warnings.simplefilter(words[0])
        _execute(*words[1:])
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = [first, *words]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), vars(main))


def _serve():
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                code = _become(**json.loads(line))
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    mine = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    del sys.path[0]
    import torch
    import triton.runtime.cache

    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "0":
        triton.runtime.cache.triton_key()  # reads all of Triton
    sys.path[:] = [path for path in sys.path if path not in mine]  # each fork has its own
    atexit._clear()  # of what was imported here; forks register their own
    gc.freeze()
    _serve()
