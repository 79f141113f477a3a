"""What is seen while the pages run: a bar with page, part and time left; and what is not seen, which goes to a log.

Libraries write warnings straight to the terminal, hundreds of them where a GPU measures: they would drown everything
else. While a page's code runs, its standard error is ``build/docs.log``, and a last line says how much came together.
"""

import contextlib
import itertools
import json
import os
import re
import sys
import types
from pathlib import Path

__all__ = ["Log", "Progress", "part", "seconds_of"]

#: Who writes what into the log: a name, and what its messages look like. A message of several lines counts once.
KINDS = {
    "ONNX Runtime": re.compile(r"^(?:\x1b\[[\d;]*m)*(\S+ \S+) \[[WEF]:onnxruntime\b[^]]*\]", re.M),
    "PyTorch": re.compile(r"^(?:\[rank\d+\]:)?([WEF]\d{4} [\d:.]+ \d+ [^\]]+\])", re.M),
    "Python": re.compile(r"^(\S+:\d+: \w*Warning): ", re.M),
}


def seconds_of(pages, generated, recorded=None):
    """How long each page may take, by name: what it took here, else what it took when it was recorded, else the middle.

    Parameters
    ----------
    pages : list of str
        Names without ``.py``.
    generated : pathlib.Path
        Where sphinx-gallery keeps ``<page>.cost.json``.
    recorded : pathlib.Path, optional
        Seconds by page, as JSON.
    """
    from fusebook.measure import machine

    known = {}
    with contextlib.suppress(ValueError):
        known.update(machine.seconds(recorded) if recorded else {})
    for page in pages:
        with contextlib.suppress(OSError, ValueError, KeyError):
            known[page] = json.loads((generated / f"{page}.cost.json").read_text(encoding="utf-8"))["time"]
    given = sorted(known[page] for page in pages if known.get(page, 0) > 0)
    middle = given[len(given) // 2] if given else 1.0
    return {page: float(known.get(page) or middle) for page in pages}


def part(text, line):
    """The heading under which a line of a page stands, and how much of the page is above it."""
    lines = text.splitlines()
    heading = ""
    for above, below in itertools.pairwise(lines[: line + 1]):
        if re.fullmatch(r"# ([-=~^])\1{2,}", below) and above.startswith("# "):
            heading = above[2:].strip()
    return heading, min(1.0, line / max(1, len(lines)))


def _line(function):
    """The line of the page at which the code begins that sphinx-gallery is about to run; 0 where it does not tell."""
    code = getattr(function, "code", None)
    lines = [line for _, _, line in code.co_lines()] if isinstance(code, types.CodeType) else []
    return min((line for line in lines if line and line > 1), default=0)  # what sphinx-gallery puts in has line 1


class Progress:
    """A bar over the seconds that the pages may take: which page runs, which part of it, and how long all still takes.

    Parameters
    ----------
    seconds : dict of str to float
        Of the pages that will run, in their order.
    file : file, optional
        Where to draw; nothing is drawn where that is no terminal, unless `always`.
    """

    def __init__(self, seconds, file=None, always=False):
        from tqdm import tqdm

        self.seconds = seconds
        self.page, self.text = "", ""
        self.done = 0.0
        self.bar = tqdm(
            total=sum(seconds.values()),
            file=file or sys.stderr,
            disable=False if always else None,
            dynamic_ncols=True,
            leave=False,
            bar_format="{percentage:3.0f} % |{bar}| {desc}, {remaining} left",
        )

    def begin(self, path):
        """A page begins."""
        self.end_page()
        self.page, self.text = Path(path).stem, Path(path).read_text(encoding="utf-8")

    def end_page(self):
        """The page that ran has ended."""
        self.done += self.seconds.get(self.page, 0.0)
        self.page = ""
        self._move(self.done)

    def step(self, function):
        """A block of the page begins."""
        if not self.page:
            return
        heading, above = part(self.text, _line(function))
        which = list(self.seconds).index(self.page) + 1 if self.page in self.seconds else "?"
        told = ": ".join(filter(None, (f"{which} of {len(self.seconds)}, {self.page}", heading)))
        self.bar.set_description_str(told, refresh=False)
        self._move(self.done + above * self.seconds.get(self.page, 0.0))

    def _move(self, to):
        self.bar.n = max(self.bar.n, min(to, self.bar.total))
        self.bar.refresh()

    def close(self):
        """All pages have run."""
        self.end_page()
        self.bar.close()


class Log:
    """A file that takes what pages write to standard error, whoever writes it: Python, C++ or another process.

    Parameters
    ----------
    path : pathlib.Path
    begun : bool
        Whether another process has begun the file, and it goes on here.
    """

    def __init__(self, path, begun=False):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not begun:
            path.write_text("", encoding="utf-8")

    def head(self, page):
        """A line that names the page that begins."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n== {page} ==\n")

    @contextlib.contextmanager
    def taking(self):
        """Standard error goes into the file."""
        sys.stderr.flush()
        before = os.dup(2)
        try:
            with self.path.open("ab") as file:
                os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)

    def summary(self):
        """How many messages of whom, as a sentence; empty where there are none."""
        text = self.path.read_text(encoding="utf-8", errors="replace")
        counts = {name: len(set(pattern.findall(text))) for name, pattern in KINDS.items()}
        told = ", ".join(f"{n} of {name}" for name, n in counts.items() if n)
        lines = [line for line in text.splitlines() if line.strip() and not re.fullmatch(r"== \S+ ==", line)]
        if not lines:
            return ""
        return f"{self.path} holds what the pages wrote to standard error: {told or 'no warning'}, {len(lines)} lines"
