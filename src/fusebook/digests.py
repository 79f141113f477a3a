"""What a function does, as a digest: its syntax tree, whatever it is called and wherever it stands.

Docstrings, comments, annotations and the names that it chose are left out, and every global that it uses is replaced by
what that stands for.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import linecache
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton.language as tl

__all__ = ["digest", "twelve"]

_HOUSE = "fusebook"
_ABROAD = re.compile(rf"<frozen|.*[-/](site|dist)-packages/|{re.escape(sysconfig.get_paths()['stdlib'])}")


def digest(thing: Any, instead: Callable[[Any], Any] | None = None) -> str:
    """Twelve digits of the sha256 of what a function does, with all that it uses.

    Parameters
    ----------
    thing : object
        A kernel, a function, a class or a value. Functions are followed as long as they are of this library or of a
        page; what lies outside, in torch, Triton or Python, is known by its name.
    instead : callable, optional
        Takes each value that is met, and returns what counts in its place: the same value, for most. With it, of a
        dict that is asked for one key only what stands there counts.

    Returns
    -------
    str
        The same on every machine, wherever the functions stand and whatever they and their variables are called.
        Docstrings, comments, annotations and the wording of errors do not count.
    """
    met = _Met(instead)
    texts = [_said(thing, met)]
    for function in met:  # which grows
        text, used = _written(function, instead)
        texts.append(text + "".join(f"|{_said(value, met)}" for value in used))
    return twelve("\n".join(texts))


def twelve(text: str) -> str:
    """Twelve digits of the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Met(list[Any]):
    """The functions and classes that were met, in that order, and what counts in the place of others."""

    def __init__(self, instead: Callable[[Any], Any] | None) -> None:
        self.instead = instead


def _said(value: Any, met: _Met) -> str:
    """A value as text; functions that are followed are numbered in the order in which they are met."""
    if met.instead is not None:
        value = met.instead(value)
    if isinstance(value, functools.partial):
        return f"partial({_said([value.func, value.args, value.keywords], met)})"
    if isinstance(value, types.MethodType):
        return f"method({_said([value.__func__, value.__self__], met)})"
    if isinstance(value, (str, bytes, bool, int, float, complex, types.NoneType, types.EllipsisType)):
        return repr(value)
    if isinstance(value, tl.constexpr):
        return _said(value.value, met)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_said(v, met) for v in value)}]"
    if isinstance(value, (dict, types.MappingProxyType)):
        if "__spec__" in value:  # what a module holds is its version's, and says where its file lies
            return f"module {value['__name__']}"
        return f"{{{','.join(f'{_said(k, met)}:{_said(v, met)}' for k, v in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"set({','.join(sorted(_said(v, met) for v in value))})"
    value = _bare(value)
    if isinstance(value, (types.FunctionType, type)):
        if not _followed(value):
            return f"{(value.__module__ or '').partition('.')[0]}:{value.__qualname__}"
        if not any(value is other for other in met):
            met.append(value)
        return f"#{next(i for i, other in enumerate(met) if value is other)}"
    if dataclasses.is_dataclass(value):
        return _said([getattr(value, field.name) for field in dataclasses.fields(value)], met)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (torch.dtype, tl.dtype)):
        return str(value)
    kind = type(value)
    home = value if kind.__module__.startswith("_cython") else kind  # whose kinds are named after its version
    return f"{home.__module__.partition('.')[0]}:{getattr(value, '__name__', kind.__qualname__)}"


def _bare(value: Any) -> Any:
    """The function inside a kernel, a cache, or whatever else keeps what it wraps."""
    while not isinstance(value, (types.FunctionType, type, types.ModuleType)):
        inner = getattr(value, "fn", None) or getattr(value, "__wrapped__", None)
        if not callable(inner):
            break
        value = inner
    return value


def _followed(value: Any) -> bool:
    """Whether a function or class is this library's or a page's, and can be read."""
    house = (value.__module__ or "").partition(".")[0]
    if house in (_HOUSE, "torch", "triton"):
        return house == _HOUSE
    file = value.__code__.co_filename if isinstance(value, types.FunctionType) else ""
    return bool(file) and not _ABROAD.match(file) and bool(linecache.getlines(file))


def _written(function: Any, instead: Callable[[Any], Any] | None) -> tuple[str, list[Any]]:
    """The text of a function or class, and the values of the globals that it uses, in order."""
    node = _node(function)
    if node is None:  # made by exec, or C
        return f"unwritten {function.__qualname__}", []
    scope = dict(vars(sys.modules.get(function.__module__, builtins)))
    if isinstance(function, types.FunctionType):
        scope = {**function.__globals__, "__file__": function.__code__.co_filename}  # a gallery names another
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                scope[name] = cell.cell_contents
    state = {name: scope[name] for name in scope if _code_of(scope[name], scope, name) is not scope[name]}
    scope |= {name: _code_of(value, scope, name) for name, value in state.items()}
    writer = _Writer(node, scope, state if instead else None)
    defaults = [function.__defaults__, function.__kwdefaults__] if isinstance(function, types.FunctionType) else []
    return writer.text(node, root=True), [*writer.used, *(d for d in defaults if d)]


@functools.lru_cache(maxsize=None)
def _tree(file: str) -> ast.Module | None:
    text = "".join(linecache.getlines(file))
    try:
        return ast.parse(text) if text else None
    except SyntaxError:
        return None


def _code_of(value: Any, scope: Mapping[str, Any], name: str) -> Any:
    """A global, or what stands for it where it is the state of this process and not code.

    A dict, a list or a set that is begun empty counts as empty, whatever it holds by now. A switch that was asked of
    the machine, such as whether Triton interprets, counts as False; and what the library chooses by it, accordingly.
    """
    if isinstance(value, (types.FunctionType, type, types.ModuleType)):
        return value
    how = _bound(scope.get("__file__") or "", name)
    if isinstance(how, ast.IfExp) and isinstance(how.test, ast.Name) and str(scope.get("__name__")).startswith(_HOUSE):
        if _code_of(True, scope, how.test.id) is False:
            return eval(compile(ast.Expression(how.orelse), "<otherwise>", "eval"), dict(scope))
    if not isinstance(value, (dict, list, set, bool, types.NoneType)):
        return value
    if isinstance(how, ast.ImportFrom):
        asked = next(alias.name for alias in how.names if name in (alias.asname, alias.name))
        module = importlib.util.resolve_name("." * how.level + (how.module or ""), scope.get("__package__"))
        house = module.partition(".")[0] == _HOUSE and module in sys.modules
        return _code_of(value, vars(sys.modules[module]), asked) if house else value
    if how is None or isinstance(how, ast.Constant):
        return value
    if isinstance(value, (bool, types.NoneType)):
        return False
    return type(value)() if ast.unparse(how) in ("{}", "[]", "dict()", "list()", "set()") else value


@functools.lru_cache(maxsize=None)
def _bound(file: str, name: str) -> ast.expr | ast.ImportFrom | None:
    """The expression, or the import, that a module binds a name to."""
    tree = _tree(file)
    for node in tree.body if tree else ():
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            if any(getattr(t, "id", "") == name for t in getattr(node, "targets", [getattr(node, "target", None)])):
                return node.value
        elif isinstance(node, ast.ImportFrom) and any(name in (alias.asname, alias.name) for alias in node.names):
            return node
    return None


@functools.lru_cache(maxsize=None)
def _places(file: str) -> dict[int, list[ast.AST]]:
    """The functions of a file by the line where they begin, decorators included."""
    found: dict[int, list[ast.AST]] = {}
    tree = _tree(file)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            found.setdefault(first, []).append(node)
    return found


def _node(function: Any) -> Any:
    """Where a function or class is written."""
    if isinstance(function, type):
        module = sys.modules.get(function.__module__)
        at: Any = _tree(str(getattr(module, "__file__", "")))
        for part in function.__qualname__.split("."):
            body = getattr(at, "body", ())
            at = next((n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part), None)
        return at
    code = function.__code__
    nodes = _places(code.co_filename).get(code.co_firstlineno, [])
    if code.co_name != "<lambda>":
        return next((n for n in nodes if getattr(n, "name", "") == code.co_name), None)
    lambdas = [n for n in nodes if isinstance(n, ast.Lambda)]
    bodies = [(n.body.lineno, n.body.end_lineno, n.body.col_offset, n.body.end_col_offset) for n in lambdas]
    here = [n for n, body in zip(lambdas, bodies, strict=True) if body in set(code.co_positions())]
    return here[0] if here else lambdas[0] if len(lambdas) == 1 else None  # several may begin on one line


#: Fields of a syntax tree that say nothing of what it does.
_SILENT = ("ctx", "kind", "returns", "type_comment", "type_params")


class _Writer:
    """A syntax tree as text, in which chosen names are numbers and globals stand aside as values."""

    def __init__(self, node: ast.AST, scope: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        self.scope = scope
        self.state = state  # globals as they are now, of which the scope has what they were begun as
        self.used: list[Any] = []
        self.names: dict[str, int] = {}
        self.local = set()
        self.imported: dict[str, Any] = {}
        for n in ast.walk(node):
            if isinstance(n, ast.arg):
                self.local.add(n.arg)
            elif isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
                self.local.add(n.id)
            elif isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n is not node:
                self.local.add(n.name)
            elif isinstance(n, (ast.Import, ast.ImportFrom)):
                self._imports(n)

    def _imports(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self.imported[alias.asname or name] = name
            elif node.module and node.module.partition(".")[0] == _HOUSE:
                module, name = importlib.import_module(node.module), alias.name
                found = vars(module)[name] if name in vars(module) else importlib.import_module(f"{node.module}.{name}")
                self.scope = {**self.scope, alias.asname or name: found}
            else:
                self.imported[alias.asname or alias.name] = f"{(node.module or '').partition('.')[0]}:{alias.name}"

    def resolved(self, node: ast.AST) -> Any:
        """The global that a name, or a chain of names through modules, stands for; `self` where it is none."""
        if isinstance(node, ast.Name):
            own = node.id in self.local or node.id in self.imported or node.id.startswith("__")
            return self if own else self.scope.get(node.id, self)
        if isinstance(node, ast.Attribute):
            base = self.resolved(node.value)
            if isinstance(base, types.ModuleType):
                value = getattr(base, node.attr, self)
                if base.__name__.partition(".")[0] == _HOUSE:
                    return _code_of(value, vars(base), node.attr)
                # What another library holds is its own matter, and the machine's: its version, a path, a table, what
                # only a build for GPUs has. Known by its name, as all that lies outside.
                own = isinstance(value, (str, bytes, bool, types.NoneType, tuple, dict, list, set))
                return self if own or base.__name__ == "torch._C" else value
        if isinstance(node, ast.Subscript) and self.state is not None and isinstance(node.value, ast.Name):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else self.resolved(node.slice)
            for held in (self.resolved(node.value), self.state.get(node.value.id)):
                if isinstance(held, dict) and isinstance(key, str) and key in held:
                    return held[key]
        return self

    def text(self, node: Any, root: bool = False) -> str:
        if isinstance(node, list):
            return f"[{','.join(self.text(n) for n in node)}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Constant):
            return repr(node.value)
        if (value := self.resolved(node)) is not self:
            self.used.append(value)
            return "@"
        if isinstance(node, ast.Name):
            if node.id in self.imported:
                return str(self.imported[node.id])
            return f"v{self.names.setdefault(node.id, len(self.names))}" if node.id in self.local else node.id
        if isinstance(node, ast.arg):
            kind = "" if node.annotation is None else ast.unparse(node.annotation)
            return f"v{self.names.setdefault(node.arg, len(self.names))}{':' + kind if 'tl.' in kind else ''}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return ""  # what is imported stands where it is used
        if isinstance(node, ast.Raise):
            exc = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            return f"Raise({'' if exc is None else self.text(exc)})"
        if isinstance(node, ast.Assert):
            return f"Assert({self.text(node.test)})"
        if isinstance(node, ast.AnnAssign):
            kind = ":constexpr" if "constexpr" in ast.unparse(node.annotation) else ""
            value = node.value or ast.Constant(...)
            return self.text(ast.Assign([node.target], value)) + kind
        if isinstance(node, ast.Call):
            return self._call(node)
        fields = {name: getattr(node, name, None) for name in node._fields if name not in _SILENT}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = isinstance(node, ast.FunctionDef) and not root
            fields["name"] = f"v{self.names.setdefault(node.name, len(self.names))}" if inner else None
            # @triton.jit says nothing; @triton.jit(do_not_specialize=...) does.
            fields["decorator_list"] = [d.keywords for d in node.decorator_list if isinstance(d, ast.Call)]
            fields["body"] = node.body[ast.get_docstring(node) is not None :]
        told = {k: v for k, v in fields.items() if v not in (None, [])}
        return f"{type(node).__name__}({','.join(f'{k}={self.text(v)}' for k, v in told.items())})"

    def _call(self, node: ast.Call) -> str:
        """Arguments that are passed by name to a kernel's helper stand at their place: their names are its choice."""
        target = self.resolved(node.func)
        helper = _bare(target) if target is not self and hasattr(target, "fn") else None
        places = list(inspect.signature(helper).parameters) if isinstance(helper, types.FunctionType) else []
        named = [
            f"{places.index(k.arg) if k.arg in places else k.arg}={self.text(k.value)}"
            for k in node.keywords
        ]  # fmt: skip
        return f"Call({self.text(node.func)},{self.text(node.args)},{','.join(named)})"
