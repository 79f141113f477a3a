"""The commands: ``nox -s docs tests lint``; on request ``browser``, ``record``, ``versions``, ``site``, ``gpu``,
``sanitize``, ``stress``, ``fuzz``, ``mutants``, ``wheel``.

All sessions share one environment, `.nox/environment`, which is made once and remade when what it should hold changes:
torch alone takes a gigabyte. ``nox --no-venv --no-install -s docs`` uses the Python it runs in and installs nothing.

FUSEBOOK_TORCH chooses the torch to install: ``cpu``, ``cuda``, or a version such as ``2.11.0``. Unset, it is the CUDA
build where ``nvidia-smi -L`` lists a GPU, and the CPU build elsewhere.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2026.4"
nox.options.sessions = ["docs", "tests", "lint"]
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).resolve().parent
HTML = ROOT / "build" / "html"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")

CPU_TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

#: The Python that the sessions run; `environment` sets it.
PYTHON = Path(sys.executable)


def gpus():
    """The lines in which ``nvidia-smi -L`` lists GPUs; none where it is missing or fails."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in listed.splitlines() if line.startswith("GPU ")]


def torch_choice(wish, found):
    """What to install for FUSEBOOK_TORCH=`wish` where `found` GPUs were listed: (device, requirement, reason)."""
    device = "cuda" if found else "cpu"
    reason = f"nvidia-smi lists {len(found)} GPU" if found else "nvidia-smi lists no GPU"
    version = ""
    if wish in ("cpu", "cuda"):
        device, reason = wish, f"FUSEBOOK_TORCH={wish}"
    elif wish[:1].isdigit():
        version, reason = wish, f"FUSEBOOK_TORCH={wish}, {reason}"
    elif wish:
        raise ValueError(f"FUSEBOOK_TORCH: expected cpu, cuda or a version such as {CPU_TORCH}, got {wish!r}")
    if device == "cpu" and not version:
        version = CPU_TORCH
    return device, f"torch=={version}" if version else "torch", reason


@nox.session(venv_backend="virtualenv", reuse_venv=True, default=False)
def environment(session):
    """Make the environment that the other sessions share."""
    global PYTHON
    if session.venv_backend == "none":
        session.log(f"no environment is made: the sessions run {PYTHON}")
        return
    PYTHON = Path(session.virtualenv.location).resolve() / "bin" / "python"
    try:
        device, torch, reason = torch_choice(os.environ.get("FUSEBOOK_TORCH", ""), gpus())
    except ValueError as error:
        session.error(str(error))
    session.log(f"{torch} for {device}: {reason}")
    wanted = nox.project.dependency_groups(PROJECT, "docs", "tests", "lint")
    library = ".[book,ort,peers]" if device == "cuda" else ".[book,ort]"
    onnxruntime = "onnxruntime-gpu" if device == "cuda" else "onnxruntime"

    stamp = PYTHON.parent.parent / "fusebook.sha256"
    text = repr((PROJECT["project"], wanted, library, device, torch, onnxruntime, sys.version))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        session.log("the environment holds what it should")
        return
    stamp.unlink(missing_ok=True)
    # Bytecode is written of what is imported, when it is: of all it takes longer than a minute, on one core.
    late = [] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]
    if device == "cpu":
        # Alone and first: "+cpu" sorts above the plain version, so a CPU wheel wins wherever it is found, and the
        # packages that follow are content with it. Where the index cannot be reached this costs two seconds.
        session.install(*late, "--no-deps", "--retries", "1", "--extra-index-url", CPU_INDEX, torch)
        torch = "torch"
    session.install(*late, "--editable", library, torch, onnxruntime, *wanted)
    stamp.write_text(digest)


def run(session, *args, **env):
    """Run the shared environment's Python on `args`."""
    path = os.pathsep.join([str(PYTHON.parent), os.environ.get("PATH", "")])
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    session.run(str(PYTHON), *args, external=True, env={"PATH": path, "PYTHONPATH": source, **env})


@nox.session(venv_backend="none", requires=["environment"])
def docs(session):
    """Build the site into build/html: measured where there is a GPU, on all where there are several; else replayed."""
    measured = {}
    if len(gpus()) > 1 and not {"FUSEBOOK_GPU", "FUSEBOOK_RECORDS"} & os.environ.keys():
        measured["FUSEBOOK_RECORDS"] = str(ROOT / "build" / "measured")
        found = ["--gpus", "all", "--changed", "--out", measured["FUSEBOOK_RECORDS"]]
        run(session, "docs/_ext/record_pages.py", *found)
    run(
        session,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-n",
        "-j",
        "1" if gpus() else str(min(4, os.cpu_count() or 1)),
        "-d",
        "build/doctrees",
        "-c",
        ".",
        "docs",
        "build/html",
        *session.posargs,
        **measured,
    )
    session.log(f"open {HTML / 'index.html'}")


def workers():
    """How pytest is spread over processes: its arguments, and the environment of each.

    On a GPU one process: times with another process on the GPU mean nothing. Elsewhere as many as there are
    cores, each with one thread: the interpreter's arrays are small.
    """
    if gpus():
        return [], {}
    many = str(min(4, os.cpu_count() or 1))
    # Neighbours stay together, as they share what is made once.
    return ["-n", many, "--dist", "worksteal"], {"OMP_NUM_THREADS": "1"}


@nox.session(venv_backend="none", requires=["environment"])
def tests(session):
    """Run the tests: interpreted where there is no GPU, compiled where there is one; with CI=1 the slow ones too."""
    spread, env = workers()
    run(session, "-m", "pytest", *spread, *session.posargs, **env)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def gpu(session):
    """Run the suite on a GPU in many processes, and alone what takes times; ends in a table."""
    run(session, "tests/suite.py", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def sanitize(session):
    """Run every operator, strategy and edge under compute-sanitizer's tools: ``-- memcheck softmax``."""
    run(session, "tests/sanitize.py", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def stress(session):
    """Run what waits, counts or starts early many thousand times while others disturb: ``nox -s stress -- softmax``."""
    run(session, "tests/stress.py", *session.posargs)
    if not session.posargs:
        run(session, "tests/stress.py", "--mps", "--calls", "10000", "--processes", "4")


@nox.session(venv_backend="none", requires=["environment"])
def lint(session):
    """Check style, spelling, types and docstrings."""
    run(session, "-m", "mypy")  # first: a test takes what it has kept
    run(session, "-m", "ruff", "check", ".")
    run(session, "-m", "ruff", "format", "--check", ".")
    run(session, "-m", "codespell_lib")
    modules = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "src").rglob("*.py"))
    run(session, "-m", "numpydoc", "lint", *modules)


#: Links torch and Triton, with the CUDA libraries that they load, into the folder that is named.
LINK_TORCH = """
import importlib.metadata, pathlib, re, sys
for found in importlib.metadata.distributions():
    if re.match("(torch|triton|nvidia(?!.ml)|cuda)([-_]|$)", found.name.lower()):
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = pathlib.Path(sys.argv[1], top)
            link.exists() or link.symlink_to(found.locate_file(top))
"""

#: What a user tries first.
FIRST_CALL = """
import fusebook, torch
x = torch.randn(4, 781, device="cuda" if torch.cuda.is_available() else "cpu")
torch.testing.assert_close(fusebook.softmax(x), torch.softmax(x, -1))
print(fusebook.__file__)
"""


@nox.session(venv_backend="virtualenv", reuse_venv=False, requires=["environment"], default=False)
def wheel(session):
    """Install the library into a fresh environment, as a user does, and call a kernel; only torch is borrowed."""
    if session.venv_backend == "none":
        session.skip("it needs an environment to install into")
    site = next(Path(session.virtualenv.location).resolve().glob("lib/python*/site-packages"))
    run(session, "-c", LINK_TORCH, str(site))
    session.install(str(ROOT))
    session.run("python", "-c", FIRST_CALL, env={"PYTHONPATH": ""})


@nox.session(venv_backend="none", requires=["environment", "docs"], default=False)
def notebooks(session):
    """Execute the notebooks of the built site as they are downloaded, each in an empty folder."""
    run(session, "-m", "pytest", "--slow", "tests/test_notebooks.py")


@nox.session(venv_backend="none", requires=["environment"], default=False)
def browser(session):
    """Try the gates of the built site: its links, and what a reader meets in a browser, which is Debian's Chromium.

    ``-- install`` installs that where it is missing, and looks at nothing.
    """
    if session.posargs != ["install"] and not (HTML / "index.html").exists():
        session.error("browser looks at build/html, and there is no site in it: run nox -s docs first")
    if not shutil.which("chromium"):
        if os.geteuid() or not shutil.which("apt-get"):
            session.error("browser needs Chromium, and there is none on the PATH: apt-get install chromium")
        session.run("apt-get", "-qq", "update", external=True)
        session.run("apt-get", "-qq", "install", "--yes", "--no-install-recommends", "chromium", external=True)
    if session.posargs != ["install"]:
        run(session, "docs/_ext/browser.py", str(HTML))


@nox.session(venv_backend="none", requires=["environment"], default=False)
def record(session):
    """Record every page, or ``nox -s record -- plot_102_softmax``, into src/fusebook/records.

    ``--stale`` records only pages whose records are stale, ``--gpus 0,1`` one page per GPU; see ``--help``.
    """
    run(session, "docs/_ext/record_pages.py", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def new(session):
    """Begin a kernel: its module, card, lesson, evidence and solutions: ``nox -s new -- my_kernel``."""
    run(session, "docs/_ext/new_kernel.py", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def explore(session):
    """Check and time random problems: ``nox -s explore -- softmax --seed 7``."""
    run(session, "-m", "fusebook.measure.explore", *session.posargs)


#: What shows differences between versions of Triton: every kernel compiled, and interpreted where a GPU is missing.
PROMISED = [
    f"tests/test_{name}.py"
    for name in "adamw cards compile elementwise gemm kmeans losses norms rope scatter_nd softmax".split()
]


@nox.session(venv_backend="none", requires=["environment"], default=False)
def versions(session):
    """Run the kernels' tests (or those named after ``--``) under the oldest Triton that is promised, and the newest.

    The newest runs twice, the second time without fused multiply-adds, which later releases leave out. For another
    torch: ``FUSEBOOK_TORCH=2.11.0 nox -s tests``.
    """
    wanted = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("triton"))
    oldest = wanted.partition(">=")[2].partition(",")[0]
    folder = ROOT / ".nox" / f"triton-{oldest}"
    if not folder.exists():
        # A folder next to the shared environment: torch stays.
        made = folder.with_name(f"{folder.name}.part")
        tools = ["-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(made)]
        run(session, *tools, f"triton=={oldest}.*")
        made.rename(folder)
    before = os.environ.get("PYTHONPATH", "")
    many = ["--processes", str(min(4, os.cpu_count() or 1))]
    for file, path, fused, what in (
        ("oldest", str(folder), "1", f"Triton {oldest}"),
        ("newest", "", "1", "the newest Triton"),
        ("unfused", "", "0", "the newest Triton without fused multiply-adds"),
    ):
        source = os.pathsep.join(filter(None, [path, str(ROOT / "src"), before]))
        which = {"PYTHONPATH": source, "TRITON_DEFAULT_FP_FUSION": fused}
        trial = ["--trial", f"Tests of kernels, {what}", "--file", f"versions_{file}"]
        run(session, "tests/suite.py", *trial, *many, *(session.posargs or PROMISED), **which)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def site(session):
    """Serve the site on this machine and rebuild it when a source changes."""
    watched = [arg for folder in ("examples", "src") for arg in ("--watch", folder)]
    ignored = ["--ignore", str(ROOT / "docs" / "auto_*" / "*")]
    run(session, "-m", "sphinx_autobuild", "-c", ".", *watched, *ignored, "docs", "build/html", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"], default=False)
def mutants(session):
    """Plant known mistakes one at a time and see which tests notice: ``nox -s mutants -- softmax``."""
    if "--ast" in session.posargs:
        run(session, "-m", "pip", "install", "--quiet", "cosmic-ray>=8.4")
    run(session, "tests/mutants.py", *session.posargs, OMP_NUM_THREADS="1")


@nox.session(venv_backend="none", requires=["environment"], default=False)
def fuzz(session):
    """Draw problems for twenty minutes of CPU; FUZZ is the seconds of each of the seven tests."""
    trial = ["--trial", "Problems that nobody chose", "--file", "fuzz", "--unit", "problems", "--processes", "2"]
    seconds = os.environ.get("FUZZ", "170")
    run(session, "tests/suite.py", *trial, "--slow", "tests/test_generated.py", *session.posargs, FUZZ=seconds)
