"""What sphinx-gallery calls while it runs the pages.

A page whose op has neither a GPU nor a record raises ``NoResults``, which is a SystemExit. Here it
becomes a banner in the place of the results, and the blocks after it are shown but not run. Under FUSEBOOK_STRICT=1 it
ends the build instead, unless it is excused: the page says itself that nothing is there yet.

sphinx-gallery has three documented places for this, and each sees a part: ``reset_argv`` is given the variables of the
script before it runs, ``show_memory`` runs every piece of code, and an image scraper is asked after each block what to
show.
"""

import contextlib
import os
import re
from pathlib import Path

__all__ = ["Runner", "banner", "described", "done", "pictures", "reset_argv", "reset_style", "runner", "strict"]


def strict():
    """Whether what is missing or false ends the build."""
    return os.environ.get("FUSEBOOK_STRICT", "") not in ("", "0")


class Runner:
    """Runs the code of a page, piece by piece, and stops the page when it has no results to show.

    An instance, with this repr, is what sphinx-gallery takes as ``show_memory``: it puts the repr into the
    configuration that Sphinx compares between builds.
    """

    def __init__(self):
        self.script = {}
        self.progress = None
        self.twins = None  # of `side_by_side`, where the site shows two GPUs
        self.log = None
        self.begin = self.finish = None  # called with the name of a page; when it ends, also with its variables

    def __repr__(self):
        return "gallery_hooks.Runner()"

    def __reduce__(self):
        return (_runner, ())  # Sphinx pickles its configuration, also for processes beside it, which have their own

    def __call__(self, function):
        if self.progress:
            self.progress.step(function)
        if "banner" in self.script:
            self.script["fake_main"].__dict__["___"] = None  # the block's last expression, which now does not run
            return 0.0, None
        try:
            with self.log.taking() if self.log else contextlib.nullcontext():
                if self.twins and "fake_main" in self.script:  # without, the gallery asks for what it starts with
                    return 0.0, self.twins.run(self.script["fake_main"], function)
                return 0.0, function()
        except SystemExit as stop:
            if not hasattr(stop, "banner") or (strict() and not getattr(stop, "excused", False)):
                raise
            self.script["banner"] = stop
            self.script["execute_script"] = False  # nor is its checksum kept: the next build tries the page again
            self.script["fake_main"].__dict__["___"] = None
            return 0.0, None


#: The one that conf.py hands to sphinx-gallery, and `reset_argv` tells which page is about to run.
runner = Runner()


def _runner():
    """The runner of this process."""
    return runner


@contextlib.contextmanager
def drawn_once():
    """A figure that is saved in both sizes is drawn in the larger one, and that picture halved: drawing takes long."""
    from matplotlib.figure import Figure
    from PIL import Image

    save, small = Figure.savefig, []

    def savefig(figure, file, dpi=None, **how):
        if dpi is None:
            small.append(str(file))
            return
        save(figure, file, dpi=dpi, **how)
        with Image.open(file) as picture:
            half = [-(-size // 2) for size in picture.size]
            picture.resize(half, Image.Resampling.LANCZOS).save(small.pop())

    Figure.savefig = savefig
    try:
        yield
    finally:
        Figure.savefig = save
    assert not small, f"saved in one size alone: {small}; see image_srcset"


def described(figure):
    """What a figure shows, for who cannot see it: titles, axes, and of each line with a name its least and most."""
    import numpy as np

    from fusebook.tables import number

    told = []
    for ax in figure.axes:
        title = ax.get_title(loc="left") or ax.get_title()
        below = [t.get_text() for t in ax.texts if getattr(t, "xyann", None) == (0, 5)] if title else []
        told.append(": ".join(filter(None, [title, *below])))
        axes = [f"{name} is {label}" for name, label in (("x", ax.get_xlabel()), ("y", ax.get_ylabel())) if label]
        told.append(", ".join(axes))
        rows = [tick.get_text() for tick in ax.get_yticklabels()] if not ax.get_ylabel() else []
        if rows and all(rows):
            told.append(f"rows: {', '.join(rows[:40])}")
        for line in ax.lines:
            name = str(line.get_label())
            values = np.asarray(line.get_xdata() if rows else line.get_ydata(), dtype=float)
            values = values[np.isfinite(values)]
            if name and not name.startswith("_") and len(values):
                told.append(f"{name}: {number(float(values.min()))} to {number(float(values.max()))}")
    return ". ".join(filter(None, told)) + "."


def pictures(block, block_vars, gallery_conf):
    """The figures of a block as the gallery saves them; who cannot see them is told their data, not their title."""
    import matplotlib.pyplot as plt
    from sphinx_gallery.scrapers import matplotlib_scraper

    told = [" ".join(described(plt.figure(number)).split()) for number in plt.get_fignums()]
    with drawn_once():
        text = matplotlib_scraper(block, block_vars, gallery_conf)  # which closes them
    shown = iter(told)
    return re.sub(r"(?m)^(\s*:alt: ).*$", lambda line: line[1] + next(shown, "a figure"), text)


def reset_argv(gallery_conf, script_vars):
    """No arguments for the page; and the place to learn which page runs."""
    from fusebook.measure import machine

    page = script_vars.get("src_file", "")
    if page and not runner.begin:  # a process beside Sphinx, which runs pages at the same time
        import fusebook_site

        fusebook_site.equip(Path(script_vars["target_file"]).parent, beside=True)
    runner.script = script_vars
    machine.running = Path(page).stem
    if runner.twins:
        runner.twins.begin()
    if runner.begin:
        runner.begin(Path(page).stem)
    if runner.log:
        runner.log.head(Path(page).stem)
    if runner.progress:
        runner.progress.begin(page)
    return []


def done():
    """The page that ran is complete, with all that is made from it: only now it need not run again."""
    if runner.finish and "src_file" in runner.script:
        runner.finish(Path(runner.script["src_file"]).stem, vars(runner.script["fake_main"]))
        runner.script = {}
    if runner.progress:
        runner.progress.end_page()


def banner(block, block_vars, gallery_conf):
    """The banner of a page without results, shown once, where they would have stood."""
    stop = block_vars.get("banner")
    if stop is None or block_vars.get("banner shown"):
        return ""
    block_vars["banner shown"] = True
    lines = "\n".join(f"    {line}" for line in stop.banner._repr_html_().splitlines())
    return f"\n.. raw:: html\n\n{lines}\n"


def reset_style(gallery_conf, fname, when):
    """Pictures without a background, so that one file serves both themes (see fusebook.css); and a page's very end.

    sphinx-gallery keeps a page's checksum before it has written the page, and a build may be cut off at any time.
    """
    import matplotlib

    if when == "after":
        done()
    matplotlib.rcParams.update({"savefig.transparent": True, "savefig.bbox": "tight"})
