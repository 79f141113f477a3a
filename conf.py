"""Sphinx and gallery settings: ``sphinx-build -c . docs build/html``. The handlers live in docs/_ext.

FUSEBOOK_URL is the address where the site will be, FUSEBOOK_REPOSITORY that of its source, or repository-code in
CITATION.cff. What needs them is off where nothing says them.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
if not os.access(ROOT, os.W_OK):
    raise PermissionError(f"{ROOT} cannot be written to, and a build writes into its folders build and docs")
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT / "src")]
# Where the pages put what they offer; fusebook_site copies it next to them. Not in auto_examples, where sphinx-gallery
# would take a script for a page.
os.environ["_FUSEBOOK_DOWNLOADS"] = str(ROOT / "docs" / "auto_downloads")
if os.environ.get("FUSEBOOK_RECORDS"):  # pages run in a folder of their own
    os.environ["FUSEBOOK_RECORDS"] = os.path.abspath(os.environ["FUSEBOOK_RECORDS"])

import numpydoc.xref  # noqa: E402

import fusebook  # noqa: E402  before triton is imported: it decides whether kernels are interpreted
import gallery_hooks  # noqa: E402
import inventories  # noqa: E402
import sorting  # noqa: E402

URL = os.environ.get("FUSEBOOK_URL", "").rstrip("/")
# Where the source is: of a fork or a mirror, by the variable; else where CITATION.cff says, if it does.
SOURCE = re.search(r"(?m)^repository-code:\s*[\"']?([^\s\"']+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))
REPOSITORY = (os.environ.get("FUSEBOOK_REPOSITORY") or (SOURCE[1] if SOURCE else "")).rstrip("/")
os.environ["FUSEBOOK_REPOSITORY"] = REPOSITORY  # pages link to it

project = "Fusebook"
author = "The Fusebook developers"
copyright = "2026, The Fusebook developers"
release = version = fusebook.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "fusebook_site",
    "front",
    "on_gpus",
    "lessons",
    "evidence_pages",
    "reading",
    "reference",
    "sorting",
]
exclude_patterns = ["_ext", "_inventories", "_static", "auto_downloads"]
default_role = "code"
nitpicky = True
# A solution is named as its page is; sphinx-gallery takes it for a second page, which it is not. And a checkout may lie
# in a folder whose name holds a space, for which sphinx-gallery warns of every page.
suppress_warnings = ["sphinx_gallery.duplicate_filename", "sphinx_gallery.space_in_filename"]

# API

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc's sections say it, in words
autosummary_generate = False  # tables only: a page holds a group
numpydoc_xref_param_type = True
LINKED = ("torch.Tensor", "torch.dtype", "pandas.DataFrame", "pandas.Series", "matplotlib.axes.Axes")
OURS = {
    name: f"measure.{home}" for name, home in {"Op": "op", "Variant": "op", "Cost": "op", "Machine": "machine"}.items()
}
# Its own words, as "sequence", lead to pages of Python that are not needed.
numpydoc_xref_aliases = {word: word for word in numpydoc.xref.DEFAULT_LINKS}
numpydoc_xref_aliases |= {name: f":py:class:`{name}`" for name in LINKED}
numpydoc_xref_aliases |= {name: f":py:class:`~fusebook.{module}.{name}`" for name, module in OURS.items()}
numpydoc_xref_ignore = "all"  # words are no types; what is named above is one
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# Small inventories, of the names that are used, from lists in the repository: without a network it is the same build.
intersphinx_mapping = inventories.write(ROOT / "build" / "inventories")

# Pages

html_theme = "pydata_sphinx_theme"
html_title = "Fusebook"
html_static_path = ["docs/_static", str(sorting.write(ROOT / "build" / "tables"))]
templates_path = ["docs/_templates"]
html_favicon = "docs/_static/favicon.svg"
html_js_files = ["reading.js"]
html_css_files = ["fusebook.css", "gallery.css", "front.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_baseurl = f"{URL}/" if URL else ""
html_theme_options = {
    "navbar_align": "left",
    "navbar_center": ["navbar-nav", "results"],
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "use_edit_page_button": bool(REPOSITORY),
    "secondary_sidebar_items": {
        "**": ["page-toc", "edit-this-page", *(["colab"] if REPOSITORY else [])],
        "auto_examples/plot_900_all_results": [],  # its tables are wide
    },
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "github-dark",
}
html_sidebars = {
    name: [] for name in ("404", "changes", "contributing", "glossary", "index", "method", "times", "your_gpu")
}
fusebook_repository = REPOSITORY
if REPOSITORY:
    html_theme_options["icon_links"] = [{"name": "Source", "url": REPOSITORY, "icon": "fa-solid fa-code-branch"}]
    html_context = {
        "edit_page_url_template": REPOSITORY + "/edit/main/{{ file_name }}",
        "edit_page_provider_name": "the source",
    }
if URL:
    extensions += ["sphinx_sitemap", "sphinxext.opengraph"]
    sitemap_url_scheme = "{link}"
    ogp_site_url = f"{URL}/"
    ogp_social_cards = {"enable": False}
    ogp_use_first_image = True
    ogp_image = f"{URL}/_images/sphx_glr_plot_102_softmax_001.png"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"


# Gallery


def processes():
    """How many processes run pages at once: those that replay share the cores, and those that measure are alone."""
    from fusebook.lesson import _place

    shared = not _place.live() and not os.environ.get("FUSEBOOK_RECORDS")
    return shared and min(4, len(os.sched_getaffinity(0)))


sphinx_gallery_conf = {
    "examples_dirs": ["../examples"],
    "gallery_dirs": ["auto_examples"],
    "filename_pattern": r"/plot_\d+",
    "ignore_pattern": r"__init__",
    "within_subsection_order": "pages.BookOrder",
    "nested_sections": False,
    "doc_module": ("fusebook",),
    "backreferences_dir": "auto_examples/backreferences",
    "prefer_full_module": {r"fusebook\.\w+"},
    "capture_repr": ("_repr_html_", "__repr__"),
    "ignore_repr_types": r"matplotlib",  # the picture is shown
    "inspect_global_variables": False,  # it would touch every tensor of the page
    "reset_argv": "gallery_hooks.reset_argv",
    "show_memory": gallery_hooks.runner,
    "image_scrapers": ("gallery_hooks.banner", "side_by_side.scraper", "gallery_hooks.pictures"),
    "reset_modules": ("matplotlib", "gallery_hooks.reset_style"),
    "reset_modules_order": "both",
    "parallel": processes(),
    "image_srcset": ["2x"],
    "write_computation_times": False,  # that page loads from three CDNs; docs/times.rst replaces it
    "min_reported_time": 1,
    "remove_config_comments": True,
    "show_signature": False,
    "default_thumb_file": str(ROOT / "docs" / "_static" / "thumb.svg"),
}
