"""Pages in the form of a lesson: gains in headings, links to files, and notebooks that install what they need.

A lesson has a module of evidence, see `fusebook.lesson.evidence`. A page about all operators has none, and has the same
form otherwise.
"""

import json
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.util import logging
from sphinx_gallery import gen_rst

import pages

__all__ = [
    "fill",
    "first_cell",
    "gains",
    "left",
    "lesson",
    "links",
    "make_notebooks",
    "notebook",
    "of_lesson_api",
    "plain_roles",
    "wheel",
]

logger = logging.getLogger(__name__)


def lesson(docname):
    """The lesson that a document of the site is; empty where it is none."""
    from fusebook.lesson import evidence

    name = docname.removeprefix("auto_examples/")
    return name if name in evidence.lessons() else ""


def of_lesson_api(docname):
    """The page that a document of the site is, if it imports `fusebook.lesson`; empty otherwise."""
    name = docname.removeprefix("auto_examples/")
    file = pages.EXAMPLES / f"{name}.py"
    found = "/" not in name and file.exists() and "import fusebook.lesson" in file.read_text(encoding="utf-8")
    return name if found else ""


def wheel():
    """The file name of the library's wheel."""
    import fusebook

    return f"fusebook-{fusebook.__version__}-py3-none-any.whl"


# Gains in headings ----------------------------------------------------------------------------------------------------


def gains(name, frames=None):
    """Each marker of a lesson, and the text that replaces it: from what a run measured, else from the record."""
    from fusebook.lesson import _numbers, evidence

    text = (pages.EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    frames = frames or evidence.Frames(evidence.load(name))
    return {found[0]: _numbers.gain(frames, **found.groupdict()) for found in _numbers.MARKER.finditer(text)}


def built(generated, name):
    """The same as of the last run of a page, which left them beside what was generated from it."""
    kept = generated / f"{name}.gains.json"
    return json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else gains(name)


def keep(file, name, shown):
    """Write down the gains that the run of a page has measured or replayed: `shown` is what the page remembered."""
    if frames := shown.get("gains"):
        file.write_text(json.dumps(gains(name, frames[-1])), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)


def fill(text, found):
    """A text with its markers filled in; the lines under headings grow with them."""
    for marker, gain in found.items():
        text = text.replace(marker, gain)
    heading = re.compile(r"^((?:# )?)(\S.*)\n\1(([-=~^])\4{3,})$", re.MULTILINE)
    return heading.sub(lambda m: f"{m[1]}{m[2]}\n{m[1]}{m[4] * max(len(m[2]), len(m[3]))}", text)


def left(text):
    """The markers that are left in a built text: an error."""
    return re.findall(r"\{gain [^}]*\}", text)


def prepare(app, docname, source):
    """Fill the headings of a lesson, and put the line with its files under the title."""
    if not (name := of_lesson_api(docname)):
        return
    generated = Path(app.srcdir) / "auto_examples"
    app.env.note_dependency(str(generated / f"{name}.gains.json"), docname=docname)
    text = fill(source[0], built(generated, name)) if lesson(docname) else source[0]
    for marker in left(text):
        logger.warning("%s: nothing fills %s", docname, marker)
    line = links(name, app.config.fusebook_repository)
    source[0] = re.sub(r"^(\S.*\n={4,}\n)", lambda m: f"{m[1]}\n{line}\n", text, count=1, flags=re.MULTILINE)


def links(name, repository=""):
    """The line under a lesson's title: how long it takes, its files, and its evidence."""
    about = next(page for page in pages.pages().values() if page.path.stem == name)
    files = [f":download:`notebook <{name}.ipynb>`", f":download:`script <{name}.py>`"]
    files.append(f":download:`both with the library <{name}.zip>`")
    if address := pages.colab(name, repository):
        files.append(f"`Colab <{address}>`__")
    where = f" Where each number is from: :doc:`evidence </evidence/{name}>`." if lesson(name) else ""
    minutes = f"{about.minutes} minute{'s' * (about.minutes != 1)}"
    return f".. container:: fb-lesson-links\n\n   {minutes}. Download: {', '.join(files)}.{where}\n"


def fix_headings(app, doctree):
    """Keep the label of a section as its only address, as its heading holds a number; and set that number apart."""
    if not lesson(app.env.docname):
        return
    for section in doctree.findall(nodes.section):
        if labels := [doctree.nameids[name] for name in section["names"] if doctree.nametypes.get(name)]:
            section["ids"] = labels
        title = section.next_node(nodes.title)
        if found := re.fullmatch(r"(.* )(\(.* at (?:M = \d+, )?N = .*\))", title.astext()):
            title.children = []
            title += [nodes.Text(found[1]), nodes.inline("", found[2], classes=["fb-gain"])]
    next(iter(doctree.findall(nodes.section)))["classes"].append("fb-lesson")


def tidy_code(doctree):
    """Code of a lesson is open, but for that of exercises; a call that only shows something is set small."""
    from reading import fold

    for block in [b for b in doctree.findall(nodes.literal_block) if b.get("language") == "Python"]:
        text = re.sub(r"\n{3,}", "\n\n", block.astext())
        block.rawsource, block.children = text, [nodes.Text(text)]
        lines = len(text.splitlines())
        above = block.parent
        while above is not None and "exercises" not in above.get("ids", []):
            above = above.parent
        if above is not None:
            closed = fold("", block.deepcopy(), summary=f"the code to fix, and its check ({lines} lines)")
            at = block.parent.index(block)
            for shown in block.parent.children[at + 1 :]:
                if isinstance(shown, nodes.raw):
                    block.parent.remove(shown)
                    closed += shown
            block.replace_self(closed)
        elif lines == 1:
            block.replace_self(nodes.container("", block.deepcopy(), classes=["fb-call"]))


# Notebooks ------------------------------------------------------------------------------------------------------------


def plain_roles(text, url=""):
    """The text of a page without roles: words, code, and links where the site has an address."""

    def plain(found):
        role, target = found[1], " ".join(found[2].split())
        words, _, address = target.removesuffix(">").partition(" <")
        if role == "math":
            return found[0]
        if role == "doc":
            stem = (address or words).rpartition("/")[2]
            known = next((page for page in pages.pages().values() if page.path.stem == stem), None)
            words = words if address or known is None else f"{known.number} {known.title}"
            folder = "" if (address or target).startswith("/") else "auto_examples/"
            return f"`{words} <{url}/{folder}{(address or target).lstrip('/')}.html>`_" if url else f"*{words}*"
        return words if role in ("term", "ref") else f"``{words.lstrip('~')}``"

    return re.sub(r":([a-z:]+):`([^`]+)`", plain, text)


def first_cell(url=""):
    """The first cell of a lesson's notebook: it installs the library where that is missing."""
    site = f"{url}/wheel/" if url else ""
    address = f'os.environ.setdefault("FUSEBOOK_URL", "{url}")  # for links\n' if url else ""
    return f"""\
# Without a GPU of compute capability 8.0 or later (free Colab's T4 is older), kernels
# run in Triton's interpreter, and times come from the record of a GPU that is named.
import importlib.util, os, pathlib, subprocess, sys

site, wheel = "{site}", pathlib.Path("{wheel()}")
if importlib.util.find_spec("fusebook") is None:
    if not site and not wheel.exists():
        sys.exit("Install Fusebook first: pip install '.[book]' in a checkout of its source")
    source = site + wheel.name if site else wheel.resolve().as_uri()
    %pip install --quiet "fusebook[book] @ {{source}}"
asked = "nvidia-smi --query-gpu=compute_cap --format=csv,noheader"
found = subprocess.run(asked, shell=True, capture_output=True, text=True).stdout.split()
if any(float(capability) < 8 for capability in found):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
{address}"""


def notebook(make, script_blocks, gallery_conf, target_dir):
    """A notebook as sphinx-gallery makes it, with gains, and without roles and comments for the site."""
    code = "\n".join(block.content for block in script_blocks if block.type == "code")
    opened = re.search(r'lesson\.(open|book)\("(\w+)"', code)
    url, found = os.environ.get("FUSEBOOK_URL", "").rstrip("/"), {}
    if opened:
        from fusebook.lesson import _place

        found = gains(opened[2], *_place.shown.get("gains", [])[-1:]) if opened[1] == "open" else {}
        gallery_conf = {**gallery_conf, "first_notebook_cell": first_cell(url), "last_notebook_cell": None}
    blocks = []
    for block in script_blocks:
        if block.type == "text":
            text = plain_roles(fill(block.content, found), url)
        else:
            text = re.sub(r"(?m)^[ \t]*# site: .*\n", "", block.content)
        blocks.append(block._replace(content=text))
    made = make(blocks, gallery_conf, target_dir)
    if rest := left(str(made)):
        raise ValueError(f"the notebook of {opened and opened[2]} has {', '.join(rest)}")
    return made


def make_notebooks():
    """Have sphinx-gallery make its notebooks by `notebook`, in this process."""
    make = gen_rst.jupyter_notebook
    if getattr(make, "__name__", "") != "as_lessons":

        def as_lessons(*given):
            return notebook(make, *given)

        gen_rst.jupyter_notebook = as_lessons


def setup(app):
    """Connect the handlers."""
    app.connect("source-read", prepare)
    app.connect("doctree-read", fix_headings, priority=100)  # before addresses are collected
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
