"""What is known of the pages: number, title, what each is for, what to have read before it, and how long it takes.

All of it stands in the page: the number in its name, the rest in its docstring, which ends in ``For whom:`` and
``Read before:``.
"""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BookOrder", "Page", "colab", "pages", "scripts", "sections"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

#: Of prose a reader takes so many words a minute, and of code so many lines.
WORDS, LINES = 200, 50

BEFORE = re.compile(r"^(?:Read before|Prerequisites): (.*)$", re.MULTILINE)
WHOM = re.compile(r"^For whom: ((?:.+\n?)+)", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One page."""

    path: Path
    title: str
    purpose: str  # the first sentences of its docstring
    whom: str  # for whom it is; empty where it does not say
    before: tuple[str, ...]  # the numbers of the pages to have read
    minutes: int

    @property
    def number(self):
        """Three digits; the first is the page's section."""
        return self.path.stem.split("_")[1]

    @property
    def document(self):
        """The page's name within the site."""
        return f"auto_examples/{self.path.stem}"


def page(path):
    """What a page says of itself; where it does not say what to have read before, that is nothing."""
    text = path.read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(text)) or path.stem
    found, whom = BEFORE.search(about), WHOM.search(about)
    prose = [line[1:] for line in text.splitlines() if line.startswith("#")]
    words = len(re.findall(r"\w+", " ".join([about, *prose])))
    lines = sum(bool(line.strip()) and not line.startswith("#") for line in text.splitlines())
    parts = re.split(r"\n\s*\n", about)[1:]
    first = next((part for part in parts if not re.match(r"Read before|Prerequisites|For whom", part)), "")
    return Page(
        path,
        title=about.splitlines()[0],
        purpose=" ".join(first.split()),
        whom=" ".join(whom[1].split()) if whom else "",
        before=tuple(re.findall(r"\d{3}", found[1])) if found else (),
        minutes=max(1, round(words / WORDS + lines / LINES)),
    )


def scripts(examples=EXAMPLES):
    """The scripts of all pages in the order of the book, examples/order.txt; those that it lacks come last."""
    file = examples / "order.txt"
    numbers = re.findall(r"^\d{3}", file.read_text(encoding="utf-8"), re.MULTILINE) if file.exists() else []
    place = {number: i for i, number in enumerate(numbers)}
    found = sorted(examples.glob("plot_*.py"))
    return sorted(found, key=lambda path: place.get(path.stem.split("_")[1], len(place)))


class BookOrder:
    """The same order, for sphinx-gallery: its thumbnails, and what is *next* to a page."""

    def __init__(self, src_dir):
        self.places = {path.name: i for i, path in enumerate(scripts(Path(src_dir)))}

    def __call__(self, filename):
        """Where a page is in the book."""
        return self.places.get(filename, len(self.places))

    def __repr__(self):
        return "pages.BookOrder"


@functools.cache
def pages(examples=EXAMPLES):
    """All pages by their number, in reading order."""
    return {found.number: found for found in map(page, scripts(examples))}


def sections(header=EXAMPLES / "GALLERY_HEADER.rst"):
    """What the first digit of a page's number means, by that digit, as the head of the gallery says it."""
    return dict(re.findall(r"^ (\d)   (.+)$", header.read_text(encoding="utf-8"), re.MULTILINE))


def colab(stem, repository):
    """Where Colab opens a page's notebook, on the branch where the site is published; empty off GitHub."""
    found = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)", repository)
    return f"https://colab.research.google.com/github/{found[1]}/blob/gh-pages/notebooks/{stem}.ipynb" if found else ""
