"""Where a page runs, and where it leaves files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from fusebook.measure import machine


def sphinx() -> bool:
    return "sphinx_gallery.gen_rst" in sys.modules


def notebook() -> bool:
    return "ipykernel" in sys.modules and not sphinx()


def ranked() -> bool:
    """Whether torchrun started this process, as one of several."""
    return "RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ


def script() -> bool:
    """A plain ``python page.py``, where an expression at the end of a block shows nothing by itself."""
    if sphinx() or notebook() or hasattr(sys, "ps1"):
        return False
    return bool(getattr(sys.modules.get("__main__"), "__file__", "")) and "pytest" not in sys.modules


def flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def live() -> bool:
    """Whether this run measures: there is a GPU, and no recorded one is named to be replayed."""
    machine.refuse_removed_variables()
    return supported() and not (os.environ.get("FUSEBOOK_GPU") or os.environ.get("FUSEBOOK_RECORDS"))


def supported() -> bool:
    """Whether there is a GPU that Triton compiles for: a T4, of compute capability 7.5, is none."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def folder() -> Path:
    """Where downloads go: never next to the page, where version control would see them."""
    root = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "page").resolve().parent.parent
    checkout = (root / "examples" / "GALLERY_HEADER.rst").exists()
    folder = Path(os.environ.get("_FUSEBOOK_DOWNLOADS") or (root if checkout else Path()) / "build" / "downloads")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def link(file: Path) -> str:
    """The address of a download as seen from the page."""
    return f"downloads/{file.name}" if os.environ.get("_FUSEBOOK_DOWNLOADS") else file.as_posix()


def note(*paths: str | Path) -> None:
    """Write down files and folders that the page is made from, where the site asks for it by ``_FUSEBOOK_DEPS``."""
    _add_to("_FUSEBOOK_DEPS", *(Path(path).resolve() for path in paths))


def stale(is_stale: bool) -> None:
    """Note that a record is missing or of older code, if ``_FUSEBOOK_STALE`` names a file for it."""
    if is_stale:
        _add_to("_FUSEBOOK_STALE", "stale")


def _add_to(variable: str, *lines: object) -> None:
    if target := os.environ.get(variable):
        with open(target, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


#: What the page has shown so far: the site makes the box under its title from it.
shown: dict[str, list[Any]] = {}


def remember(kind: str, *things: Any) -> None:
    """Keep what the page shows for the site, which sets ``_FUSEBOOK_DEPS``; nobody else asks for it."""
    if os.environ.get("_FUSEBOOK_DEPS"):
        shown.setdefault(kind, []).extend(things)
