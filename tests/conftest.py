"""What all tests share. fusebook is imported first: it decides whether Triton compiles or interprets."""

import collections
import contextlib
import fcntl
import gc
import importlib.util
import os
import pathlib
import sys
import time
import types

import pytest
import torch

import a_gpu_each  # noqa: F401  (before anything asks CUDA what there is)
import compiling
import fusebook  # noqa: F401  (before triton, see fusebook/__init__.py)
import interpreting
import memcheck
import promised
import trials
import warm
from fusebook.lesson import _place
from fusebook.measure import compiled as compiled_module
from fusebook.measure import machine

interpreting.hasten()
memcheck.guard()

#: Tests of the documentation, which import what builds it.
collect_ignore = []
if importlib.util.find_spec("docutils") is None:
    collect_ignore += ["test_reading.py", "test_site.py", "test_verdicts.py"]


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_was_shown_before(monkeypatch):
    """What a page has asked for in one test is not named in another, and no page runs."""
    monkeypatch.setattr(machine, "running", "")
    monkeypatch.setattr(_place, "shown", {})


@pytest.fixture(scope="session", autouse=True)
def _no_page_is_shown():
    """The library tells by what is loaded whether Sphinx or a notebook shows a page; other tests load both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_place, "sphinx", lambda: False)
        patch.setattr(_place, "notebook", lambda: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _launches_are_found_by_a_fork():
    """The library asks a new process, which imports torch and Triton first."""
    with pytest.MonkeyPatch.context() as patch:
        asked = types.SimpleNamespace(
            run=lambda command, *, input, env, **_: warm.run(*command[1:], input=input, env=env)
        )
        patch.setattr(compiled_module, "subprocess", asked)
        yield


# A GPU that several processes share


def _of_all(tmp_path_factory):
    """A folder that all workers of a run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True)
def _no_memory_is_kept():
    """A process that keeps gigabytes for its next test keeps them from the others."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def room(tmp_path_factory):
    """A function by which a test asks for much of the GPU's memory, in bytes: those that ask run one at a time.

    It waits until others have given back what they hold; where the GPU has too little, the test is skipped. Without a
    GPU it does nothing.
    """
    with contextlib.ExitStack() as held:

        def ask(need):
            if not torch.cuda.is_available():
                return
            needed = f"needs {need / 2**30:.0f} GiB of GPU memory"
            if need > 0.9 * torch.cuda.mem_get_info()[1]:
                pytest.skip(needed)
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            lock = held.enter_context((_of_all(tmp_path_factory) / f"room-{gpu}").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            until = time.monotonic() + 60  # below what a test may take
            while torch.cuda.mem_get_info()[0] < need:
                if time.monotonic() > until:
                    pytest.skip(f"{needed}, of which others hold too much")
                time.sleep(0.05)

        yield ask
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


_failed = set()
_outcomes = promised.Outcomes()


def pytest_runtest_logreport(report):
    _outcomes.add(report)
    if report.failed:
        _failed.add(report.nodeid)


def pytest_runtest_logfinish(nodeid):
    """End a worker for which an error has stopped a GPU, so that one test fails and not all behind it.

    Another worker takes its place. What the test itself said has been passed on.
    """
    if nodeid in _failed and "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            for gpu in range(torch.cuda.device_count()):
                torch.cuda.synchronize(gpu)
        except RuntimeError as error:
            print(f"{nodeid} has stopped a GPU: {error}", file=sys.stderr, flush=True)
            os._exit(70)


# Slow tests


LEFT_OUT = "slow, left out"


def pytest_addoption(parser):
    parser.addoption(
        "--slow",
        action="store_true",
        default=bool(os.environ.get("CI")),
        help="run the slow tests too; so does CI=1 in the environment",
    )
    parser.addoption("--told", help="a trial's log, to which what becomes of each test is added as it ends, see trials")


class _Told:
    """Tells a log what becomes of each test; of several processes only the one that collects from the others does."""

    def __init__(self, log):
        self.log = log

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            why = str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else report.longreprtext[-3000:]
            more = dict(report.user_properties)  # n, how many problems it has drawn
            self.log.came(report.nodeid, report.outcome, took=round(report.duration, 2), why=why, **more)

    def pytest_collection_finish(self, session):
        self.log.say(selected=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        if node.gateway.id == "gw0":  # the others collect the same
            self.log.say(selected=len(ids))


def pytest_configure(config):
    if config.getoption("--told") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Told(trials.Log(pathlib.Path(config.getoption("--told")))))


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.name == "test_compile.py")  # last: they wait for what begins with the first
    names = ["slow"] if torch.cuda.is_available() else ["slow", "slow_interpreted"]
    if not config.getoption("--slow"):
        for item in items:
            if any(item.get_closest_marker(name) for name in names):
                item.add_marker(pytest.mark.skip(LEFT_OUT))


def pytest_collection_finish():
    """Keep what was imported out of all later collections of garbage, each of which would walk through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    """Fail a run of all tests, the slow ones too, in which a promised test passed nowhere."""
    gc.unfreeze()  # libraries tell of what they find alive at the end
    config = session.config
    some = any(config.getoption(name) for name in ("keyword", "markexpr", "deselect", "collectonly", "maxfail"))
    whole = config.getoption("slow") and config.args_source == config.ArgsSource.TESTPATHS and not some
    if whole and not hasattr(config, "workerinput") and (untried := list(_outcomes.untried())):
        config.get_terminal_writer().line("\npromised in docs/method, and passed nowhere:\n" + "\n".join(untried))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Count what was skipped by its reason, so that a test that never runs is seen."""
    reasons = collections.Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if collect_ignore:
        reasons["files of the documentation, since docutils is missing"] = len(collect_ignore)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count:4d}: {reason}")


def pytest_unconfigure(config):
    """Name and count in the last line what was left out because it is slow."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    left = collections.Counter(
        report.nodeid.split("::")[-1].split("[")[0] for report in skipped if LEFT_OUT in str(report.longrepr)
    )
    if left:
        named = ", ".join(f"{name} ({count})" for name, count in left.items())
        reporter.write_line(f"{sum(left.values())} slow tests left out, which CI=1 or --slow runs: {named}")


# Kernels compiled beside the tests


@pytest.fixture(scope="session", autouse=True)
def compiled(request, tmp_path_factory):
    """The folder in which a process beside the tests answers what those that this run has selected ask `compiling`.

    It begins with the first test, whichever that is, and of several workers the first to come starts it, for all.
    """
    asked = [
        item.callspec.params["task"]
        for item in request.session.items
        if item.path.name == "test_compile.py" and not item.get_closest_marker("skip")
    ]
    folder = _of_all(tmp_path_factory) / "compiled"
    if not asked:
        yield folder
        return
    try:
        folder.mkdir()
    except FileExistsError:  # another worker's
        yield folder
        return
    process = compiling.start(folder, sorted(asked, reverse=True))
    yield folder
    process.wait()  # others may still be waiting for what this worker has not asked for
