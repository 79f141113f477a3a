"""Triton's interpreter, without a step that it takes again and again: where pages are built, and in tests.

Whenever a kernel calls a device function, the interpreter looks through the whole of triton.language for what it has to
replace. That takes longer than the rest of most calls. Here it is found once, and replaced once a launch.
"""

import functools
import inspect

import triton
import triton.language as tl
from triton.runtime import interpreter

WHAT_IS_CHANGED = ("GridExecutor", "_patch_attr", "_patch_builtin", "_patch_lang")


def hasten():
    """Change the interpreter so; one that is built otherwise stays as it is."""
    if not all(hasattr(interpreter, name) for name in WHAT_IS_CHANGED):
        return
    launch, replace, replaced = interpreter.GridExecutor.__call__, interpreter._patch_lang, {}

    @functools.cache
    def builtins(package):
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def replace_builtins(package, builder, scope):
        for name in builtins(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    def replace_once(fn):
        if id(fn.__globals__) not in replaced:
            replaced[id(fn.__globals__)] = replace(fn)
        return replaced[id(fn.__globals__)]

    @functools.wraps(launch)
    def launch_anew(self, *args, **kwargs):
        replaced.clear()  # what the launch before this one has replaced it has put back
        return launch(self, *args, **kwargs)

    interpreter._patch_builtin, interpreter._patch_lang = replace_builtins, replace_once
    if triton.__version__ < "3.7":
        # It takes arrays of one number for numbers, as NumPy did until 2.3.
        change = interpreter._patch_lang_tensor

        def change_and_index(tensor, scope):
            change(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        interpreter._patch_lang_tensor = change_and_index
    interpreter.GridExecutor.__call__ = launch_anew
