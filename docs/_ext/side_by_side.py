"""Pages of two GPUs: the reader's own, whose records FUSEBOOK_RECORDS names, beside the one that the package has.

Each piece of a page's code runs twice, for the reader's GPU and then for the other, with variables of its own for each.
What a block shows stands in two tabs where it differs, the reader's first; all tabs of the site follow each other.
"""

import ast
import contextlib
import html
import os
import re
from pathlib import Path

__all__ = ["Twins", "scraper"]


@contextlib.contextmanager
def _environment(**changes):
    """The environment with other values in it; None takes one out."""
    before = {name: os.environ.get(name) for name in changes}

    def take(values):
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    take(changes)
    try:
        yield
    finally:
        take(before)


class Twins:
    """What a page is for the reader's GPU, while the gallery sees it for the other.

    Parameters
    ----------
    records : path
        As FUSEBOOK_RECORDS names it.
    """

    def __init__(self, records):
        from fusebook.measure import machine

        self.records = str(Path(records).resolve())
        with _environment(FUSEBOOK_RECORDS=self.records):
            mine, shipped = (machine.load(place / "machine.json").name for place in machine.places())
        self.labels = {"yours": f"Yours: {mine}", "shipped": f"{shipped}, shipped"}
        self.begin()

    def begin(self):
        """Another page: no variables yet, and nothing has stopped it."""
        self.names = None
        self.figures = []
        self.stopped = ""

    def run(self, module, function):
        """Run a piece of code for the reader's GPU and then for the other, whose variables stay in `module`."""
        import matplotlib.pyplot as plt

        if not self.stopped:
            names = vars(module)
            theirs, before = dict(names), set(plt.get_fignums())
            mine = self.names or theirs
            names.clear()
            names.update(mine)
            offered = os.path.join(os.environ.get("_FUSEBOOK_DOWNLOADS", "."), "yours")
            try:
                with _environment(FUSEBOOK_RECORDS=self.records, _FUSEBOOK_DOWNLOADS=offered, FUSEBOOK_STRICT=None):
                    function()
            except (Exception, SystemExit) as error:  # a GPU that lacks what the page counts on: the other goes on
                self.stopped = f"From here on this page cannot be shown for your GPU: {type(error).__name__}: {error}"
            function.run = False  # the gallery lets a piece of code run once
            self.names = dict(names)
            _unregister(value for name, value in names.items() if value is not theirs.get(name))
            names.clear()
            names.update(theirs)
            self.figures += sorted(set(plt.get_fignums()) - before)
        from fusebook.measure import machine

        with _environment(FUSEBOOK_RECORDS=None, FUSEBOOK_GPU=os.environ.get("FUSEBOOK_GPU") or machine.SHIPPED):
            return function()

    def show(self, block, block_vars, gallery_conf):
        """What a block shows, in two tabs where it differs; nothing where the gallery shows it as it always does."""
        if self.names is None:
            return ""
        names = vars(block_vars["fake_main"])
        tree = ast.parse(block.content).body
        ends = bool(tree) and isinstance(tree[-1], ast.Expr)
        if self.stopped:
            shown = f'<p class="fb-banner">{html.escape(self.stopped)}</p>'
        else:
            shown = _own_files(_as_html(self.names.get("___"), gallery_conf)) if ends else ""
        other = _as_html(names.get("___"), gallery_conf) if ends else ""
        paths = block_vars["image_path_iterator"]
        pictures, files = [], []
        for mine in (True, False):
            first = len(paths)
            pictures.append(_pictures(self.figures, mine, block, block_vars, gallery_conf))
            files.append([Path(path).read_bytes() for path in list(paths.paths)[first:]])
        self.figures = []
        if self.stopped:
            self.names = None
        if shown == other and files[0] == files[1]:
            return pictures[1]
        names["___"] = None
        shown = re.sub(r'\b(id|for|name)="', r'\1="yours-', shown).replace('href="#', 'href="#yours-')
        parts = zip(self.labels.items(), pictures, (shown, other), strict=True)
        return "\n\n.. tab-set::\n   :sync-group: gpu\n\n" + "".join(
            f"   .. tab-item:: {label}\n      :sync: {key}\n\n{_indented(picture)}\n{_raw(text)}\n"
            for (key, label), picture, text in parts
        )


def _unregister(values):
    """Take back operators that a piece of code has defined: it defines them again when it runs for the other GPU."""
    import torch

    for value in values:
        if isinstance(value, torch.library.Library):
            value._destroy()


def _as_html(value, gallery_conf):
    """What the gallery would show of a block's last expression."""
    if value is None or re.search(gallery_conf["ignore_repr_types"], str(type(value))):
        return ""
    return value._repr_html_() if hasattr(value, "_repr_html_") else f"<pre>{html.escape(repr(value))}</pre>"


def _own_files(text):
    """What offers a file that is another one for the reader's GPU, with the address of that."""
    offered = Path(os.environ.get("_FUSEBOOK_DOWNLOADS", "."))

    def own(match):
        files = [offered / "yours" / match[1], offered / match[1]]
        same = all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes()
        return match[0] if same else f'href="downloads/yours/{match[1]}"'

    return re.sub(r'href="downloads/([^"]+)"', own, text)


def _indented(text, by=6):
    return "".join(f"{' ' * by}{line}\n" if line.strip() else "\n" for line in text.splitlines())


def _raw(text):
    inside = '<div class="output_subarea output_html rendered_html output_result">\n' + text + "\n</div>"
    return f"      .. raw:: html\n\n{_indented(inside, 10)}" if text else ""


def _pictures(figures, mine, block, block_vars, gallery_conf):
    """The pictures of the figures that are the reader's, or of the others, saved as the gallery saves them."""
    from matplotlib import _pylab_helpers

    from gallery_hooks import pictures

    managers = _pylab_helpers.Gcf.figs
    kept = {number: managers.pop(number) for number in list(managers) if (number in figures) != mine}
    text = pictures(block, block_vars, gallery_conf)  # and closes what it has saved
    managers.update(kept)
    return text


def scraper(block, block_vars, gallery_conf):
    """What a block shows of two GPUs, where there are two."""
    from gallery_hooks import runner

    return runner.twins.show(block, block_vars, gallery_conf) if runner.twins else ""
