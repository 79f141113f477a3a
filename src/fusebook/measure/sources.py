"""Hashes of source code: whether what was measured is what the code does today.

A row of a record carries two. ``code`` covers every definition that an implementation reaches by name, from the
function that its card calls to the kernels, launchers and tables. It decides about GPU times and memory. ``host``
covers the call path, through which all launchers go. It decides about launch times and latency only.

A hash is made from syntax trees. Docstrings, comments and annotations do not count, except ``tl.constexpr``. Nor does
what no call that is timed runs in the call path, which are refusals and the definitions in `UNTIMED`.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib.util
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fusebook.measure.op import Op

__all__ = ["CALL_PATH", "UNTIMED", "hashes", "of_functions", "of_variant", "reached"]

#: The modules through which all launchers go: ``code`` stops here, and ``host`` covers them.
CALL_PATH = ("fusebook.kernels._call",)

#: Its functions, methods and classes that run only under a compiler, a transform or autocast, or to refuse. No call
#: that is timed enters one, which ``tests/test_operator.py`` checks.
UNTIMED = frozenset(
    "_compiled _shaped dispatched one_by_one _no_gradient _no_tangents refuse _Transformed _any_of _filled "
    "autocasts_in_graph register_writes _writes _written".split()
)
#: This one of them only registers. A statement that calls it is left out as if it were not there.
_REGISTERS = "register_writes"

# What else of the package is read. The rest measures, and `fusebook.measure.timing.VERSION` says when that changes.
_READ = ("fusebook.kernels", "fusebook.cards", "fusebook.ort", "fusebook.lesson.evidence.")
# This one runs baselines of ONNX Runtime, which their functions in the cards describe.
_RUNNER = "fusebook.ort.graph"
_PLAIN = (str, int, float, types.NoneType)
_SILENT = ("ctx", "kind", "returns", "type_comment", "type_params")


class _Module(NamedTuple):
    """A file: the statements that make each name, what its names import, and its functions by their first line."""

    name: str
    definitions: dict[str, list[ast.stmt]]
    imports: dict[str, tuple[str, str]]
    functions: dict[int, list[Any]]


def hashes(*functions: Any) -> tuple[str, str]:
    """The two hashes of what functions do.

    Parameters
    ----------
    *functions : callable or None
        Where the walk starts.

    Returns
    -------
    code, host : str
        Twelve digits each. `host` is empty if the call path is not reached.
    """
    code, host = _walked(functions)
    return _twelve(sorted(code.values())), _twelve(sorted(host.values())) if host else ""


def reached(*functions: Any) -> set[tuple[str, str]]:
    """The definitions that functions reach by name, without those of the call path: a module and a name each."""
    return {key for key in _walked(functions)[0] if isinstance(key, tuple)}


def _walked(functions: Iterable[Any]) -> tuple[dict[Any, str], dict[Any, str]]:
    """The source of all definitions that functions reach by name, and of those in the call path."""
    code: dict[Any, str] = {}
    host: dict[Any, str] = {}
    ahead: list[Any] = list(functions)
    while ahead:
        thing = ahead.pop()
        if isinstance(thing, _Definition):
            known = host if thing.module.name in CALL_PATH else code
            key = thing.module.name, thing.name
            if key not in known:
                statements = thing.module.definitions[thing.name]
                read = [_read(s if known is code else _timed(s)) for s in statements]
                known[key] = "".join(text for text, _ in read)
                found = [t for _, names in read for t in _reached(thing.module, names)]
                # The call path does not lead back to kernels.
                ahead += [t for t in found if known is code or t.module.name in CALL_PATH]
        elif id(thing) not in code:
            code[id(thing)], more = _start(thing)
            ahead += more
    return code, host


def of_variant(op: Op, name: str) -> tuple[str, str]:
    """`hashes` of an implementation of a card."""
    variant = op.variants[name]
    return of_functions(variant.run, variant.prepare)


@functools.lru_cache(maxsize=None)
def of_functions(*functions: Any) -> tuple[str, str]:
    """`hashes` of functions, made once."""
    return hashes(*functions)


def _twelve(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


# From names to definitions --------------------------------------------------------------------------------------------


class _Definition(NamedTuple):
    module: _Module
    name: str


def _start(thing: Any) -> tuple[str, list[Any]]:
    """An object as text, and the definitions and objects that it leads to."""
    if isinstance(thing, functools.partial):
        return _parts(thing.func, *thing.args, *thing.keywords, *thing.keywords.values())
    if isinstance(thing, (list, tuple)):
        return _parts(*thing)
    if callable(made := getattr(thing, "_init_fn", None)):  # an operator; triton_op wraps its function once more
        inside = [cell.cell_contents for cell in made.__closure__ or () if made.__module__.startswith("torch.")]
        thing = next(filter(callable, inside), made)
    while not isinstance(thing, (types.FunctionType, type)):  # a kernel, a cached function, a method
        inner = next((v for n in ("fn", "__wrapped__", "__func__") if callable(v := getattr(thing, n, None))), None)
        if inner is None:
            plain = isinstance(thing, _PLAIN)
            return repr(thing) if plain else f"{type(thing).__name__} {getattr(thing, '__name__', '')}", []
        thing = inner
    if isinstance(thing, type):
        file, home, name = _file(thing.__module__), thing.__module__, thing.__qualname__
    else:  # not by its attributes, which functools.wraps replaces
        file, home, name = thing.__code__.co_filename, thing.__globals__["__name__"], thing.__code__.co_qualname
    if not (module := _module(file, home)):
        return f"{home}.{name}", []
    if name in module.definitions:
        return "", [_Definition(module, name)]
    # A lambda, or a function within another: what it says, what it closes over, and what it reaches by name.
    text, ahead = _parts(*(cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()))
    texts = [text]
    code = getattr(thing, "__code__", None)
    for node in module.functions.get(getattr(code, "co_firstlineno", 0), []):
        if getattr(node, "name", "<lambda>") == getattr(code, "co_name", ""):
            text, names = _read(node)
            texts.append(text)
            ahead += _reached(module, names, getattr(thing, "__globals__", {}))
    return "".join(texts) or name, ahead


def _parts(*values: Any) -> tuple[str, list[Any]]:
    """Plain values as text, in their order, and the others."""
    return ",".join(repr(v) if isinstance(v, _PLAIN) else "" for v in values), [
        v for v in values if not isinstance(v, _PLAIN)
    ]


def _reached(module: _Module, names: Iterable[str], scope: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """The definitions that dotted names of a module mean; objects of `scope` if the file does not say."""
    for name in names:
        first, *rest = name.split(".")
        if first in module.definitions:
            yield _Definition(module, first)
        elif first in module.imports:
            home, attribute = module.imports[first]
            yield from _imported([*home.split("."), *([attribute] if attribute else []), *rest])
        elif isinstance((value := (scope or {}).get(first)), types.FunctionType) or hasattr(value, "fn"):
            yield value


def _imported(path: list[str]) -> Iterator[_Definition]:
    """The definition at a path through packages and modules."""
    for n in range(len(path) - 1, 0, -1):
        home = ".".join(path[:n])
        if module := _module(_file(home), home):
            if home == "fusebook":  # which gathers the public functions of all families
                found = getattr(getattr(sys.modules.get(home), path[n], None), "__module__", "")
                module = _module(_file(found), found) if found != home else None
            yield from _reached(module, [".".join(path[n:])]) if module else ()
            return


@functools.lru_cache(maxsize=None)
def _file(module: str) -> str:
    """The file of a module; empty for packages of others, which are not read, and not imported to be found."""
    own = module.partition(".")[0] == "fusebook"
    if "." in module and not own:
        return ""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return ""
    return (spec.origin or "") if spec and (own or not spec.submodule_search_locations) else ""


@functools.lru_cache(maxsize=None)
def _module(file: str, name: str) -> _Module | None:
    """A module of the package that is read, or a file of neither a package nor Python: a page."""
    path = pathlib.Path(file)
    own = name == "fusebook" or (name.startswith(_READ) and name != _RUNNER)
    foreign = name.startswith("fusebook.") or path.is_relative_to(sysconfig.get_paths()["stdlib"])
    foreign = foreign or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    foreign = foreign or (path.parent / "__init__.py").exists()  # another project's package, in any folder
    if path.suffix != ".py" or not path.exists() or (foreign and not own):
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    made = _Module(name, {}, {}, {})
    for statement in tree.body:
        for bound in dict.fromkeys(_bound(statement)):
            made.definitions.setdefault(bound, []).append(statement)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                home = alias.name if alias.asname else alias.name.partition(".")[0]
                made.imports[alias.asname or home] = home, ""
        elif isinstance(node, ast.ImportFrom):
            home = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            made.imports.update({alias.asname or alias.name: (home, alias.name) for alias in node.names})
        elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            made.functions.setdefault(first, []).append(node)
    return made


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement gives a value, or changes, at the level of its module."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(getattr(node, "ctx", None), ast.Store) and not isinstance(node, (ast.Tuple, ast.List, ast.Starred)):
        yield getattr(node, "id", "") or getattr(getattr(node, "value", None), "id", "")
    elif not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)


class _Timed(ast.NodeTransformer):
    """Leaves out what runs in no call that is timed."""

    def visit_Raise(self, node: ast.Raise) -> ast.Pass:
        return ast.Pass()

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        called = getattr(node.value.func, "id", "") if isinstance(node.value, ast.Call) else ""
        if called == _REGISTERS:
            return None
        return ast.Pass() if called in UNTIMED else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if node.name in UNTIMED else self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        return None if node.name in UNTIMED else self.generic_visit(node)


@functools.lru_cache(maxsize=None)
def _timed(statement: ast.stmt) -> ast.AST:
    return _Timed().visit(copy.deepcopy(statement)) or ast.Pass()


# From a syntax tree to text -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _read(node: ast.AST) -> tuple[str, tuple[str, ...]]:
    """A syntax tree as text, and the names in it, dotted where they go through modules."""
    names: dict[str, None] = {}
    return _text(node, names), tuple(names)


def _text(node: Any, names: dict[str, None]) -> str:
    """Node names and fields that are not empty, in which all versions of Python agree."""
    if isinstance(node, list):
        kept = [n for n in node if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        return f"[{','.join(filter(None, (_text(n, names) for n in kept)))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        here = isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fusebook"))
        return "" if here else ast.unparse(node)  # definitions may move within the package
    if isinstance(node, ast.AnnAssign) and "constexpr" not in ast.unparse(node.annotation):
        return _text(ast.Assign([node.target], node.value), names) if node.value else ""
    if isinstance(node, (ast.Name, ast.Attribute)) and (dotted := _dotted(node)):
        names[dotted] = None
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "annotation" and "constexpr" not in (ast.unparse(value) if value else ""):
            continue
        if name not in _SILENT and value not in (None, []):
            fields.append(f"{name}={_text(value, names)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _dotted(node: ast.AST) -> str:
    """A name, or a chain of attributes of one; empty for another expression."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""
