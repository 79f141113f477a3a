"""The reference: a table of each group, what the functions are used for, and on which pages.

Public functions and modules of the library are found because they are there; a new kernel needs no line here.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

from sphinx.util.docutils import SphinxDirective

import pages

__all__ = ["Kernels", "Modules", "pages_of"]

HEAD = ".. autosummary::\n\n"


def families():
    """The public functions of each module of kernels: name of the family, names of functions, number of its page."""
    import fusebook
    from fusebook import cards

    told = {module.__name__.rpartition(".")[2]: f"{module.PAGE:03}" for module in cards.FAMILIES}
    found = {}
    for name, function in vars(fusebook).items():
        if inspect.isfunction(function) and function.__module__.startswith("fusebook.kernels."):
            found.setdefault(function.__module__.rpartition(".")[2], []).append(name)
    return [(family, names, told.get(family)) for family, names in found.items()]


def pages_of(name, backreferences):
    """The numbers of the pages that tell of a public function, that of its card first.

    Parameters
    ----------
    name : str
        Such as ``fusebook.softmax``.
    backreferences : pathlib.Path
        Where sphinx-gallery keeps which page uses what.
    """
    known = pages.pages()
    own = [page for _, names, page in families() if name.removeprefix("fusebook.") in names and page in known]
    index = backreferences / "backreferences_all.json"
    used = json.loads(index.read_text(encoding="utf-8")).get(name, []) if index.exists() else []
    text = json.dumps(used)
    return [*own, *(number for number, page in known.items() if number not in own and page.path.name in text)]


class Kernels(SphinxDirective):
    """The public functions of every kernel module; with ``eager`` as its argument the chains that they replace."""

    optional_arguments = 1

    def run(self):
        """Ask the library what it offers."""
        import fusebook

        for module in Path(fusebook.kernels.__file__).parent.glob("*.py"):
            self.env.note_dependency(str(module))
        eager = bool(self.arguments)
        found = [
            (family, [name for name in names if name.endswith("_eager") == eager]) for family, names, _ in families()
        ]
        every = [name for _, names in found for name in names]
        text = HEAD + "".join(f"   fusebook.{name}\n" for name in every) + "\n"
        text += "".join(f".. autofunction:: fusebook.{name}\n\n" for name in every)
        return self.parse_text_to_nodes(text)


class Modules(SphinxDirective):
    """Modules of the library: a table of what each offers, and all of it."""

    has_content = True

    def run(self):
        """Read the ``__all__`` of the modules that are named, one a line."""
        text = ""
        for name in filter(None, map(str.strip, self.content)):
            module = importlib.import_module(name)
            self.env.note_dependency(module.__file__)
            described = [
                n
                for n in module.__all__
                if inspect.isroutine(getattr(module, n)) or inspect.isclass(getattr(module, n))
            ]
            own = [f"~{name}.{n}" for n in described]
            text += f"{name}\n{'-' * len(name)}\n\n{HEAD}" + "".join(f"   {n}\n" for n in own)
            text += f"\n.. automodule:: {name}\n   :members:\n\n"
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def name_pages(app, what, name, obj, options, lines):
    """End the description of a kernel with the pages that tell of it; what only pages are written with has none.

    Bars are those of absolute values, and name no substitution.
    """
    lines[:] = [re.sub(r"(``[^`]*``)|\|", lambda found: found[1] or r"\|", line) for line in lines]
    if what != "function" or name.count(".") != 1:
        return
    folder = Path(app.srcdir) / "auto_examples" / "backreferences"
    app.env.note_dependency(str(folder / "backreferences_all.json"))
    known = pages.pages()
    if numbers := pages_of(name, folder):
        links = ", ".join(f":doc:`{n} {known[n].title} </{known[n].document}>`" for n in numbers)
        lines += ["", f".. rubric:: Page{'s' if len(numbers) > 1 else ''}", "", links, ""]


def setup(app):
    """Connect the handlers."""
    app.add_directive("kernels", Kernels)
    app.add_directive("modules", Modules)
    app.connect("autodoc-process-docstring", name_pages, priority=900)  # after numpydoc
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
