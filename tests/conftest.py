"""What all tests share. fusebook is imported first: it decides whether Triton compiles or interprets."""

import collections
import os

import pytest
import torch

import compiling
import fusebook  # noqa: F401  (before triton, see fusebook/__init__.py)
import interpreting
import memcheck
from fusebook.page import _place

interpreting.hasten()
memcheck.guard()


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_page_is_shown():
    """The library tells by what is loaded whether Sphinx or a notebook shows a page; other tests load both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_place, "sphinx", lambda: False)
        patch.setattr(_place, "notebook", lambda: False)
        yield


# Slow tests


LEFT_OUT = "slow, left out"


def pytest_addoption(parser):
    parser.addoption(
        "--slow",
        action="store_true",
        default=bool(os.environ.get("CI")),
        help="run the slow tests too; so does CI=1 in the environment",
    )


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: "compiled" in item.fixturenames)  # last, as they wait for what begins with the first
    names = ["slow"] if torch.cuda.is_available() else ["slow", "slow_interpreted"]
    if not config.getoption("--slow"):
        for item in items:
            if any(item.get_closest_marker(name) for name in names):
                item.add_marker(pytest.mark.skip(LEFT_OUT))


def pytest_terminal_summary(terminalreporter):
    """Count what was skipped by its reason, so that a test that never runs is seen."""
    reasons = collections.Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
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
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
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
