"""Code that a reader did not come for is folded: what imports, measures, checks, tabulates, draws and decides.

Kernels and calls stay open, and so do results. Which is which is read off the syntax of a page's code: a statement that
uses the harness, or what was made by it, belongs to the harness. A comment line ``# site: open`` or ``# site: fold``
right above a statement decides for it, and is not shown; nor is a line that only names what stands below it. Scripts
and notebooks keep all of it.
"""

import ast
import re
from dataclasses import dataclass

__all__ = ["Page", "Part"]

#: Modules whose use makes a statement part of the harness; of ``fusebook`` all but its kernels and its functions.
HARNESS = ("matplotlib", "pandas", "statistics", "time", "timeit")
LIBRARY = (
    *("bench", "cards", "check", "compiled", "explore", "inputs", "machine", "page", "plots", "record", "tables"),
    *("timing", "tune"),
)

#: What harness does, by the names it calls, in the order in which a summary tells it.
DOES = {
    "measured": ("bench", "explored", "measured", "records", "results", "time", "timeit", "timing"),
    "checked": ("check", "exercise", "judge", "judged", "yardstick"),
    "tabulated": ("DataFrame", "downloads", "table", "tables"),
    "drawn": ("draw", "matplotlib", "plots", "plt", "subplots"),
    "decided": ("claim", "claims", "holds", "target"),
    "shown": ("Folded", "Listing", "Source", "Tabs", "provenance", "solution"),
}
_MARK = re.compile(r"# site: (open|fold)")


@dataclass(frozen=True)
class Part:
    """Lines of a block of code that are open, where `summary` is empty, or folded under it.

    Those that are `bare` only name what is shown below them, such as a source: a page goes without.
    """

    text: str
    summary: str = ""
    bare: bool = False


def _used(node):
    """The names that a statement takes from outside itself."""
    own = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.Lambda):
            arguments = part.args
            own |= {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
            own |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a}
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        own |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return {name.id for name in names if isinstance(name.ctx, ast.Load)} - own


def _made(node):
    """The names that a statement gives to the page."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _words(node):
    """Every name and attribute in a statement."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
    }


def _imported(node):
    """The names that an import gives, and which of them are the harness's."""
    for name in node.names:
        given = name.asname or name.name.split(".")[0]
        path = name.name if isinstance(node, ast.Import) else f"{node.module}.{name.name}"
        top, _, rest = path.partition(".")
        yield given, top in HARNESS or (top == "fusebook" and rest.split(".")[0] in LIBRARY)


def _is_jit(node):
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)


class Page:
    """The blocks of code of a page, in their order: what one makes, the next may use."""

    def __init__(self):
        self.harness = set()

    def parts(self, text):
        """A block of code in parts that are open or folded.

        Parameters
        ----------
        text : str

        Returns
        -------
        list of Part
            Together all lines of the block, but for blank ones between parts.
        """
        try:
            body = ast.parse(text).body
        except SyntaxError:
            return [Part(text)]
        lines = text.splitlines()
        wishes = {i: match[1] for i, line in enumerate(lines) if (match := _MARK.fullmatch(line))}
        folds = [
            next((wishes[i] == "fold" for i in range(self._start(lines, node), node.lineno) if i in wishes), fold)
            for node, fold in zip(body, self._folds(body), strict=True)
        ]
        found = []
        for node, fold in zip(body, folds, strict=True):
            if not found or found[-1][0] != fold:
                found.append((fold, []))
            found[-1][1].append(node)
        starts = [0, *(self._start(lines, nodes[0]) for _, nodes in found[1:]), len(lines)]
        parts = []
        for (fold, nodes), first, last in zip(found, starts, starts[1:], strict=False):
            part = "\n".join(line for i, line in enumerate(lines[first:last], first) if i not in wishes).strip("\n")
            bare = fold and all(map(_only_shows, nodes))
            parts.append(Part(part, self._summary(nodes, part) if fold else "", bare))
        return parts or [Part(text)]

    def _start(self, lines, node):
        """The line where a statement begins, with its decorators and the comments right above it."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
        while first and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        return first

    def _folds(self, body):
        """Whether each statement is folded."""
        folds = []
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.harness |= {name for name, harness in _imported(node) if harness}
                folds.append(True)
                continue
            fold = not _is_jit(node) and bool(_used(node) & self.harness)
            if fold:
                self.harness |= _made(node)
            else:
                self.harness -= _made(node)
            folds.append(fold)
        if any(folds):  # what only prepares goes with what it prepares
            folds = [
                fold or not (isinstance(node, ast.FunctionDef | ast.ClassDef) or _is_text(node))
                for node, fold in zip(body, folds, strict=True)
            ]
        return folds

    def _summary(self, nodes, text):
        count = len(text.splitlines())
        lines = f"({count} line{'s' if count > 1 else ''})"
        if all(isinstance(n, ast.Import | ast.ImportFrom) for n in nodes):
            return f"imports {lines}"
        words = set().union(*map(_words, nodes))
        does = [name for name, calls in DOES.items() if words & set(calls)]
        if len(does) > 1 and "shown" in does:
            does.remove("shown")
        if any(isinstance(n, ast.Import | ast.ImportFrom) for n in nodes):
            return f"imports, and what this page was asked for {lines}"
        told = " and ".join(filter(None, (", ".join(does[:-1]), does[-1]))) if does else "prepared"
        return f"how this was {told} {lines}"


def _only_shows(node):
    """Whether a statement only names what is shown: by a call of its own, or in one line that decides nothing."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    if isinstance(node.value.func, ast.Name) and node.value.func.id in DOES["shown"]:
        return True
    does = {*DOES["measured"], *DOES["checked"], *DOES["decided"]}
    return node.lineno == node.end_lineno and not does & _words(node)


def _is_text(node):
    """Whether a statement is a program in another language."""
    value = getattr(node, "value", None)
    return (
        isinstance(node, ast.Assign)
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and "\n" in value.value
    )
