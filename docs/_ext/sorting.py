"""Tables that sort and filter: DataTables, from the package itables, beside the site's own files; no network.

itables brings DataTables with its extensions as one module of JavaScript. A page that is opened as a file may not load
modules, so it is published as a plain script that leaves ``DataTable`` behind. docs/_static/tables.js says which tables
and which columns.
"""

import re
from pathlib import Path

__all__ = ["plain", "setup", "write"]

EXPORT = re.compile(r"export\s*\{([^}]*)\};?")


def plain(module):
    """A script of what was a module: its default export becomes ``window.DataTable``.

    Raises
    ------
    ValueError
        Where it does not export as it did when this was written.
    """
    exports = EXPORT.findall(module)
    names = re.findall(r"([\w$]+) as default\b", exports[0]) if len(exports) == 1 else []
    if len(names) != 1:
        raise ValueError(f"sorting: expected one list of exports with a default in itables' bundle, got {exports}")
    return f"(() => {{\n{EXPORT.sub('', module)}\nwindow.DataTable = {names[0]};\n}})();\n"


def write(folder):
    """Write script and style into a folder, which is returned; empty where itables is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import itables
    except ImportError:
        return folder
    bundle = Path(itables.__file__).parent / "html"
    script = folder / "datatables.js"
    text = plain((bundle / "dt_bundle.js").read_text(encoding="utf-8"))
    if not script.exists() or script.read_text(encoding="utf-8") != text:
        script.write_text(text, encoding="utf-8")
        (folder / "datatables.css").write_bytes((bundle / "dt_bundle.css").read_bytes())
    return folder


def load(app, pagename, templatename, context, doctree):
    """Let a page that has such a table load what sorts it, and no other page."""
    if "fb-sortable" in context.get("body", ""):
        app.add_css_file("datatables.css", priority=100)
        app.add_js_file("datatables.js", loading_method="defer")
        app.add_js_file("tables.js", loading_method="defer")


def setup(app):
    """Look at each page."""
    app.connect("html-page-context", load, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
