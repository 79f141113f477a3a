"""What all tests share. fusebook is imported first: it decides whether Triton compiles or interprets."""

import collections

import pytest
import torch

import fusebook  # noqa: F401  (before triton, see fusebook/__init__.py)


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter):
    """Count what was skipped by its reason, so that a test that never runs is seen."""
    reasons = collections.Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count:4d}: {reason}")
