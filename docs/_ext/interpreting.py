"""Triton's interpreter, without steps that it takes again and again: where pages are built, and in tests.

Whenever a kernel calls a device function, the interpreter looks through the whole of triton.language for what it has to
replace. That takes longer than the rest of most calls. Here it is found once, and replaced once a launch.

Whenever a kernel adds two blocks, the interpreter makes their types anew, and finds out by six more operations whether
an integer overflows, which it tells nobody unless it debugs. Here a type is made once, who does not debug does not ask,
and the type that two blocks are computed in is asked of those that are no pointers only.

Of each argument of each operation it asks four times whether it is a constant. Here what is no constant by its class is
taken as it is.

Whenever a kernel takes bfloat16 for float32, of which it is the upper half, or the other way round, the interpreter
takes numbers apart and puts them together, and gets those wrong that are too small to be normal. Here they are halved.
Else what kernels compute, and what is refused, is the same.
"""

import functools
import inspect
import types

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

WHAT_IS_CHANGED = {
    interpreter: ("GridExecutor", "_convert_float", "_get_np_dtype", "_patch_attr", "_patch_builtin", "_patch_lang"),
    tl.core: ("_unwrap_if_constexpr",),
    TritonSemantic: (
        *("binary_op_sanitize_overflow_impl", "binary_op_type_checking_impl"),
        *("broadcast_impl_value", "computation_type_impl"),
    ),
}


def hasten():
    """Change the interpreter so; one that is built otherwise stays as it is, and so does the compiler."""
    if triton.knobs.runtime.interpret and all(
        hasattr(o, name) for o, names in WHAT_IS_CHANGED.items() for name in names
    ):
        hasten_calls()
        hasten_types()
        hasten_halves()


def hasten_types():
    """Make types, and the shapes of blocks, once, and ask for no overflow that nobody is told of."""
    block, tensor, own = tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__
    blocks, shapes = {}, {}

    def make_block(self, element_ty, shape):
        sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "values", shape))
        known = blocks.get(key := (element_ty.name, sizes))
        if known is None:
            block(self, element_ty, shape)
            known = blocks[key] = dict(self.__dict__)
        self.__dict__.update(known, element_ty=element_ty)

    def make_tensor(self, handle, type):
        known = shapes.get(sizes := tuple(type.shape.values) if type.is_block() else ())
        if known is None:
            tensor(self, handle, type)
            known = shapes[sizes] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(known, handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor
    tl.dtype.__eq__ = lambda self, other: self is other or own(self, other)
    unwrap, plain = tl.core._unwrap_if_constexpr, {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}
    plain |= {int, float, bool, str, types.NoneType}
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    widen = TritonSemantic.broadcast_impl_value

    def widen_others(self, lhs, rhs):
        alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if alike else widen(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = widen_others
    ask = TritonSemantic.binary_op_sanitize_overflow_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, *sum: self.builder.options.debug and ask(self, *sum)
    find_type = TritonSemantic.binary_op_type_checking_impl

    def find_other_type(self, lhs, rhs, left_pointer=False, right_pointer=False, arithmetic=True, division=False):
        if not arithmetic or not type(lhs) is type(rhs) is tl.tensor or lhs.dtype.is_ptr() or rhs.dtype.is_ptr():
            return find_type(self, lhs, rhs, left_pointer, right_pointer, arithmetic, division)
        kind = self.computation_type_impl(lhs.dtype, False, rhs.dtype, False, division)
        return self.broadcast_impl_value(*(x if x.dtype == kind else self.cast(x, kind) for x in (lhs, rhs)))

    TritonSemantic.binary_op_type_checking_impl = find_other_type
    of_numpy, kinds = interpreter._get_np_dtype, {}

    def numpy_type(kind):
        if (known := kinds.get(name := kind.scalar.name)) is None:
            known = kinds[name] = of_numpy(kind)
        return known

    interpreter._get_np_dtype = numpy_type
    TritonSemantic.computation_type_impl = functools.cache(TritonSemantic.computation_type_impl)


def hasten_halves():
    """Take bfloat16 for the upper half of float32, which it is; the interpreter cuts off the lower one, too."""
    convert = interpreter._convert_float

    def convert_others(input, input_dtype, output_dtype, rounding_mode):
        kinds = input_dtype.name, output_dtype.name
        if kinds == ("bf16", "fp32"):
            return input.astype(np.uint32) << 16
        if kinds == ("fp32", "bf16") and rounding_mode is None:
            return (input.view(np.uint32) >> 16).astype(np.uint16)
        return convert(input, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert_others


def hasten_calls():
    """Replace the language's functions once a launch."""
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
    interpreter.GridExecutor.__call__ = launch_anew
