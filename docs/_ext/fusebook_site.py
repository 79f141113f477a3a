"""What the site does that its extensions do not: which pages run again, what is published beside them, and links.

A page is run again when its own text changes; sphinx-gallery sees to that. It also runs again when something that it
is made from has changed: the library, what it noted that it read, or what decides whether it measures or replays. The
notes and a hash of all this are kept beside the generated page.
"""

import atexit
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx_gallery.utils import get_md5sum

import front
import gallery_hooks
import gallery_progress
import interpreting
import lessons
import pages
import side_by_side

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
UNFINISHED = ".unfinished"

#: Variables that decide what a page shows, and packages that do.
SWITCHES = (
    "FUSEBOOK_GPU",
    "FUSEBOOK_RECORDS",
    "FUSEBOOK_REPOSITORY",
    "FUSEBOOK_STRICT",
    "TRITON_INTERPRET",
)
PACKAGES = ("torch", "triton", "pandas", "matplotlib", "sphinx-gallery")


# Which pages run again


#: Where a page that runs notes what it reads, see ``fusebook.lesson._place``.
NOTES = "_FUSEBOOK_DEPS"


def common(root=ROOT):
    """What every page is made from: all modules but those of families of kernels."""
    source = root / "src" / "fusebook"
    families = {p for name in ("cards", "kernels") for p in (source / name).glob("*.py") if p.stem[0] != "_"}
    return sorted({*source.rglob("*.py")} - families)


def families(page, names):
    """The modules of kernels and cards that a page uses: by the values of its variables `names`, and of ``fusebook``.

    A card is made of a module's functions, and a module of what it takes from others.
    """
    import fusebook
    from fusebook.measure.op import Op

    found = set()
    waiting = [*names.values()]
    waiting += [getattr(fusebook, name, None) for name in re.findall(r"\bfusebook\.(\w+)", page)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | tuple):
            waiting += [v for v in (value.values() if isinstance(value, dict) else value) if isinstance(v, Op)]
            continue
        value = value.make if isinstance(value, Op) else value
        name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if re.match(r"fusebook\.(cards|kernels)\.[a-z]", str(name)) and name not in found:
            found.add(name)
            waiting += vars(sys.modules[name]).values()
    return [Path(sys.modules[name].__file__) for name in sorted(found)]


def circumstances():
    """What else decides what a page shows: switches, the Python, packages, and the GPU."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    hooks = (Path(__file__).parent / "gallery_hooks.py").read_text(encoding="utf-8")
    return [device, sys.version, versions, {name: os.environ.get(name, "") for name in SWITCHES}, hooks]


def stamp(noted, around, root=ROOT):
    """A hash of all that a page is made from, apart from its own text: what it noted, and what all are made from."""
    digest = hashlib.sha256(json.dumps(around, sort_keys=True).encode())
    for path in [*common(root), *sorted({Path(line) for line in noted.splitlines()})]:
        digest.update(f"{path.relative_to(root) if path.is_relative_to(root) else path}\0".encode())
        if path.is_dir():
            digest.update("\0".join(sorted(p.name for p in path.glob("*.csv"))).encode())
        elif path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def forget_stale(examples, generated, around, root=ROOT):
    """Make sphinx-gallery run those pages again that are made from something else now; returns their names.

    A page that was not complete when a build was cut off has no stamp, and the next build goes on with it.
    """
    stale = []
    for page in sorted(examples.glob("plot_*.py")):
        kept, notes = (generated / f"{page.stem}.{kind}" for kind in ("stamp", "deps"))
        if kept.exists() and notes.exists() and kept.read_text() == stamp(notes.read_text(), around, root):
            continue
        (generated / f"{page.name}.md5").unlink(missing_ok=True)
        kept.unlink(missing_ok=True)
        stale.append(page.stem)
    return stale


def begin_page(generated, name):
    """The page `name` is about to run, and notes what it reads beside what is generated from it."""
    notes = generated / f"{name}.deps"
    notes.write_text("")
    os.environ[NOTES] = str(notes)
    from fusebook.lesson import _place

    _place.shown.clear()


def end_page(generated, around, root, name, names):
    """The page `name` is complete, its variables are `names`: leave the stamp of what it was made from."""
    notes = generated / f"{name}.deps"
    page = (root / "examples" / f"{name}.py").read_text(encoding="utf-8")
    noted = {*notes.read_text().splitlines(), *map(str, families(page, names))}
    text = "".join(f"{line}\n" for line in sorted(noted))
    notes.write_text(text)
    from fusebook.lesson import _place

    lessons.keep(generated / f"{name}.gains.json", name, _place.shown)
    _place.shown.clear()
    (generated / f"{name}.stamp").write_text(stamp(text, around, root))


def to_run(examples, generated):
    """The names of the pages that sphinx-gallery will run: their text is not the one that it ran."""
    names = []
    for page in sorted(examples.glob("plot_*.py")):
        kept = generated / f"{page.name}.md5"
        if not kept.exists() or kept.read_text() != get_md5sum(page, mode="t"):
            names.append(page.stem)
    return names


def clean_orphans(examples, generated, html):
    """Remove what was generated from pages that are gone: Sphinx would warn of it. Returns their names."""
    there = {page.stem for page in examples.glob("*.py")}
    gone = {path.stem for path in generated.glob("*.py")} - there
    for stem in gone:
        for folder in (generated, html):
            for path in [*folder.rglob(f"{stem}.*"), *folder.rglob(f"sphx_glr_{stem}_[0-9t]*")]:
                path.unlink()
    if gone:  # they may be all that refers to a name, and are in lists that are then not written again
        shutil.rmtree(generated / "backreferences", ignore_errors=True)
    return sorted(gone)


def before_gallery(app):
    """Clean what is gone, and mark what must run again."""
    generated = Path(app.srcdir) / "auto_examples"
    gone = clean_orphans(ROOT / "examples", generated, Path(app.outdir))
    if gone:
        logger.info("removed what was generated from pages that are gone: %s", ", ".join(gone))
    offered = Path(app.srcdir) / "auto_downloads"
    if not offered.is_dir():  # what the pages offer is gone, and only they can make it anew
        for kept in generated.glob("*.stamp"):
            kept.unlink()
        offered.mkdir()
    around = circumstances()
    stale = forget_stale(ROOT / "examples", generated, around)
    if stale:
        logger.info("to be run, as what they are made from has changed: %s", ", ".join(stale))
    names = to_run(ROOT / "examples", generated)
    if names:
        for line in records_stale():  # found out at once, which is sooner than page by page
            logger.info(line)
        equip(generated, around)
        if len(names) == 1:  # another process would first import what this one has
            app.config.sphinx_gallery_conf["parallel"] = False
            app.parallel = 1  # no fork of a process in which a page has left threads
        if not app.config.sphinx_gallery_conf["parallel"]:
            seconds = gallery_progress.seconds_of(names, generated, recorded_seconds())
            gallery_hooks.runner.progress = gallery_progress.Progress(seconds)


def records_stale():
    """A line on each record that pages will replay, in which something is of earlier code."""
    from fusebook.lesson import _place

    found = {} if _place.live() else front.found()
    return [f"{name}: {'; '.join(stale)}" for name, frame in found.items() if (stale := frame.attrs["origin"].stale)]


def equip(generated, around=None, beside=False):
    """Have pages that run note what they read, and write what they say into the log.

    Parameters
    ----------
    generated : pathlib.Path
        The folder of what is made from the pages.
    around : list, optional
        Of `circumstances`.
    beside : bool
        Whether this is a process beside Sphinx, which goes on with the log.
    """
    runner = gallery_hooks.runner
    records = os.environ.get("FUSEBOOK_RECORDS")
    runner.twins = side_by_side.Twins(records) if records else None
    runner.begin = functools.partial(begin_page, generated)
    runner.finish = functools.partial(end_page, generated, around or circumstances(), ROOT)
    runner.log = gallery_progress.Log(ROOT / "build" / "docs.log", begun=beside)
    interpreting.hasten()
    lessons.make_notebooks()
    if beside:
        # loky takes what pages import for a leak, and begins another process, which imports it again.
        import joblib.externals.loky.process_executor as loky

        loky._MAX_MEMORY_LEAK_SIZE = 2**32
    gc.collect()
    gc.freeze()  # the gallery collects garbage after each block: what is there now is none
    atexit.register(gc.unfreeze)


def recorded_seconds():
    """The file of the seconds that each page took when this GPU was recorded; None where pages replay."""
    import torch

    from fusebook.lesson import _place
    from fusebook.measure import machine

    if not _place.live():
        return None
    return machine.RECORDS / machine.slug_of(torch.cuda.get_device_name()) / "seconds.json"


def after_gallery(app):
    """All pages are complete."""
    if gallery_hooks.runner.progress:
        gallery_hooks.runner.progress.close()
    gallery_hooks.runner.progress = gallery_hooks.runner.begin = gallery_hooks.runner.finish = None
    os.environ.pop(NOTES, None)
    gc.set_threshold(100_000, 50, 50)  # Sphinx keeps nearly all of what it makes of them


def count_messages(app, exception):
    """Say what went into the log instead of onto the terminal."""
    if gallery_hooks.runner.log and (told := gallery_hooks.runner.log.summary()):
        logger.info(told)


# What is published beside the pages


def publish(app, exception):
    """Copy the raw records, and the tables that pages offer, to where the pages' links point."""
    if exception is not None or app.builder.format != "html":
        return
    html = Path(app.outdir)
    for source, target in (
        (ROOT / "src" / "fusebook" / "records", html / "records"),
        (Path(app.srcdir) / "auto_downloads", html / "auto_examples" / "downloads"),
    ):
        shutil.rmtree(target, ignore_errors=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    made = build_wheel(html / "wheel")
    publish_scripts(html / "_downloads", Path(app.srcdir) / "auto_examples", made)
    if not app.config.fusebook_repository and front.under_git():
        publish_source(html / front.ARCHIVE)
    notebooks = html / "notebooks"
    shutil.rmtree(notebooks, ignore_errors=True)
    if app.config.fusebook_repository:  # at an address that a link can name: downloads have a hash in theirs
        notebooks.mkdir()
        for notebook in (Path(app.srcdir) / "auto_examples").glob("plot_*.ipynb"):
            shutil.copy(notebook, notebooks)


def publish_source(file):
    """Put the source of this commit into an archive, for readers of a site that knows no address of its repository."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = ["git", "archive", "--format=zip", "--prefix=fusebook/", f"--output={file}", "HEAD"]
    subprocess.run(made, cwd=ROOT, check=True)


def build_wheel(folder):
    """Build the wheel that notebooks install; None without hatchling, or in a copy of some folders only."""
    if not (ROOT / "pyproject.toml").exists():
        return None
    if importlib.util.find_spec("hatchling") is None:
        logger.info("no wheel is built, and notebooks install nothing: hatchling is not installed")
        return None
    made = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    return folder / lessons.wheel()


def publish_scripts(folder, generated, wheel=None):
    """Make the scripts that are downloaded run by themselves, also those in archives.

    Parameters
    ----------
    folder : pathlib.Path
        Of the downloads.
    generated : pathlib.Path
        The folder of what is made from the pages.
    wheel : pathlib.Path, optional
        Of the library, for the archives of lessons.
    """

    def complete(name, text):
        return lessons.fill(text, lessons.built(generated, name)) if lessons.lesson(name) else text

    for path in folder.rglob("plot_*.py"):
        path.write_text(complete(path.stem, path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in folder.rglob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            parts = {info: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for info, content in parts.items():
                if info.filename.endswith(".py"):
                    content = complete(Path(info.filename).stem, content.decode()).encode()
                archive.writestr(info, content)
            if wheel and lessons.of_lesson_api(path.stem):
                archive.write(wheel, wheel.name)


# The text of pages


def without_noise(app, docname, source):
    """Drop what a build says of itself: memory, and the seconds of the machine that replays."""
    for line in (
        r"^\*\*Estimated memory usage:\*\* .*\n",
        r"^\.\. rst-class:: sphx-glr-timing\n\n   \*\*Total running time.*\n",
    ):
        source[0] = re.sub(line, "", source[0], flags=re.MULTILINE)


class BuildTimes(SphinxDirective):
    """A table of how long each page took when it last ran."""

    def run(self):
        """Read what sphinx-gallery keeps beside each page."""
        rows = []
        for cost in sorted((Path(self.env.srcdir) / "auto_examples").glob("plot_*.cost.json")):
            self.env.note_dependency(str(cost))
            page = cost.name.removesuffix(".cost.json")
            if not cost.with_name(f"{page}.py.md5").exists():  # it has no results now; the time is of an earlier run
                continue
            rows.append(f"   * - :doc:`/auto_examples/{page}`\n     - {json.loads(cost.read_text())['time']:.1f}\n")
        if not rows:
            return [nodes.paragraph(text="No page has run yet.")]
        table = ".. list-table::\n   :header-rows: 1\n\n   * - Page\n     - Seconds\n" + "".join(rows)
        return self.parse_text_to_nodes(table)


class Ran(SphinxDirective):
    """A Python command of the library, and what it prints: it is run, in an empty folder, and sees no GPU."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        """Run it again only when what it is made from changes."""
        python, *words = shlex.split(self.arguments[0])
        if python != "python":
            raise self.error(f"ran: expected a command that begins with python, got {self.arguments[0]!r}")
        source = ROOT / "src"
        for path in [source / f"{words[1].replace('.', '/')}.py", *source.glob("fusebook/records/*/machine.json")]:
            self.env.note_dependency(str(path))
        before = os.environ.get("PYTHONPATH")
        env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEBOOK_")}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(source), before])), "CUDA_VISIBLE_DEVICES": ""}
        with tempfile.TemporaryDirectory() as folder:
            ran = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
        said = f"$ {self.arguments[0]}\n{ran.stdout}{ran.stderr}".replace(str(ROOT), "...").rstrip()
        block = nodes.literal_block(said, said, language="text")
        return [block]


def outdated(app, env, added, changed, removed):
    """Read the page of build times again when a page has run, and everything after a build that did not end.

    What such a build was writing, when it was interrupted or the disk was full, is cut short and newer than its source.
    """
    mark = Path(app.outdir) / UNFINISHED
    everything = env.found_docs if mark.exists() else set()
    mark.touch()
    return everything | ({"times"} & env.all_docs.keys() if added or changed or removed else set())


def only_ours(app, env):
    """Drop the sources of others that are nobody's target: processes that read side by side each hand some in."""
    known = getattr(env, "_viewcode_modules", {})
    for name in [name for name, entry in known.items() if entry and not entry[2]]:
        del known[name]


def finished(app, error):
    """A build that has written all it had to."""
    if error is None:
        (Path(app.outdir) / UNFINISHED).unlink(missing_ok=True)


def edit_links(app, pagename, templatename, context, doctree):
    """Point "Edit this page" at examples/*.py where the page was generated from one."""
    repository = app.config.fusebook_repository
    if not repository or not pagename:
        return
    page = pagename.removeprefix("auto_examples/")
    if pagename == "auto_examples/index":
        path = "examples/GALLERY_HEADER.rst"
    elif pagename.startswith("auto_examples/"):
        path = f"examples/{page}.py"
    else:
        path = f"docs/{pagename}.rst"
    context["get_edit_provider_and_url"] = lambda: (None, f"{repository}/edit/main/{path}")


def colab_link(app, pagename, templatename, context, doctree):
    """Offer a page's notebook in Colab, from the branch where the site is published."""
    address = pages.colab(pagename.removeprefix("auto_examples/"), app.config.fusebook_repository)
    if address and pagename.startswith("auto_examples/plot_"):
        context["colab"] = address


# Formulas as MathML, which browsers draw by themselves: no script, no fonts, no network


def inline_math(self, node):
    """Write an inline formula."""
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block_math(self, node):
    """Write a formula of its own."""
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=True))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app):
    """Connect the handlers."""
    app.add_config_value("fusebook_repository", "", "env", types=[str])
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(block_math, None))
    app.add_directive("build-times", BuildTimes)
    app.add_directive("ran", Ran)
    app.connect("builder-inited", before_gallery, priority=100)  # the gallery runs at 500
    app.connect("builder-inited", after_gallery, priority=900)
    app.connect("source-read", without_noise)
    app.connect("env-get-outdated", outdated)
    app.connect("env-updated", only_ours)
    app.connect("html-page-context", colab_link, priority=100)  # before the theme drops what would be empty
    app.connect("html-page-context", edit_links, priority=900)  # after the theme
    app.connect("build-finished", finished, priority=100)  # before a page that failed ends it: that is all written
    app.connect("build-finished", publish)
    app.connect("build-finished", count_messages, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
