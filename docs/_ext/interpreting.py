"""Triton's interpreter, without steps that it takes again and again: where pages are built, and in tests.

Whenever a kernel calls a device function, the interpreter looks through the whole of triton.language for what it has to
replace. That takes longer than the rest of most calls. Here it is found once, and replaced once a launch. What replaces
it calls the language's function itself, and not what refuses calls from outside of a kernel.

Whenever a kernel adds two blocks, the interpreter makes their types anew, and finds out by six more operations whether
an integer overflows, which it tells nobody unless it debugs. Here a type is made once, who does not debug does not ask,
and the type that two blocks are computed in is found once. A number that meets a block becomes one in one step.

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
    interpreter.TensorHandle: ("__init__", "__post_init__"),
    tl.core: ("_unwrap_if_constexpr",),
    TritonSemantic: (
        *("binary_op_sanitize_overflow_impl", "binary_op_type_checking_impl"),
        *("broadcast_impl_value", "cast", "computation_type_impl"),
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
    blocks, widened = {}, {}

    def of_tensors(type):
        """What tensors of a type have in common."""
        tensor(made := tl.tensor.__new__(tl.tensor), None, type)
        return {"shape": made.shape, "numel": made.numel}

    def make_block(self, element_ty, shape):
        sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "values", shape))
        known = blocks.get(key := (element_ty.name, sizes))
        if known is None:
            block(self, element_ty, shape)
            self.of_tensors = of_tensors(self)
            known = blocks[key] = dict(self.__dict__)
        self.__dict__.update(known, element_ty=element_ty)

    def make_tensor(self, handle, type):
        self.__dict__.update(type.of_tensors, handle=handle, type=type, dtype=type.scalar)

    tl.dtype.of_tensors = of_tensors(tl.int32)
    tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor
    tl.dtype.__eq__ = lambda self, other: self is other or own(self, other)
    unwrap, plain = tl.core._unwrap_if_constexpr, {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}
    plain |= {int, float, bool, str, types.NoneType}
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    widen = TritonSemantic.broadcast_impl_value

    def spread(self, one, block):
        kind = widened.get(key := (id(one.dtype), *block.shape.values))
        if kind is None:
            kind = block.with_element_ty(one.dtype)
            if type(one.dtype) is tl.dtype:  # of pointers each launch has its own
                widened[key] = kind  # keeps the dtype, and so its id
        return tl.tensor(self.builder.create_splat(kind, one.handle), kind)

    def widen_others(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if left.is_block() != right.is_block():
            return (lhs, spread(self, rhs, left)) if left.is_block() else (spread(self, lhs, right), rhs)
        alike = left.is_block() and left.shape.values == right.shape.values
        return (lhs, rhs) if alike else widen(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = widen_others
    cast = TritonSemantic.cast

    def cast_others(self, input, dst_ty, fp_downcast_rounding=None):
        if input.dtype is dst_ty and not fp_downcast_rounding:
            return input
        return cast(self, input, dst_ty, fp_downcast_rounding)

    TritonSemantic.cast = cast_others
    ask = TritonSemantic.binary_op_sanitize_overflow_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, *sum: self.builder.options.debug and ask(self, *sum)
    find_type, found = TritonSemantic.binary_op_type_checking_impl, {}

    def find_other_type(self, lhs, rhs, left_pointer=False, right_pointer=False, arithmetic=True, division=False):
        if not arithmetic or not type(lhs) is type(rhs) is tl.tensor:
            return find_type(self, lhs, rhs, left_pointer, right_pointer, arithmetic, division)
        left, right = lhs.dtype, rhs.dtype
        if (known := found.get(key := (id(left), id(right), division))) is None:
            if left.is_ptr() or right.is_ptr():
                return find_type(self, lhs, rhs, left_pointer, right_pointer, arithmetic, division)
            kind = self.computation_type_impl(left, False, right, False, division)
            known = found[key] = kind, left, right  # which are kept, and so their ids
        kind = known[0]
        lhs = lhs if left is kind else self.cast(lhs, kind)
        rhs = rhs if right is kind else self.cast(rhs, kind)
        return self.broadcast_impl_value(lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = find_other_type
    of_numpy, kinds = interpreter._get_np_dtype, {}

    def numpy_type(kind):
        if (known := kinds.get(name := kind.scalar.name)) is None:
            known = kinds[name] = of_numpy(kind)
        return known

    interpreter._get_np_dtype = numpy_type
    TritonSemantic.computation_type_impl = functools.cache(TritonSemantic.computation_type_impl)

    def keep(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is not tl.dtype or 8 * data.itemsize > max(8, dtype.primitive_bitwidth):
            self.__post_init__()  # which looks closer

    interpreter.TensorHandle.__init__ = keep


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
    checks, made = tl.core.arange.__code__, {}

    def replace_attr(package, name, member, builder, scope):
        if (known := made.get(member)) is None:
            semantic = getattr(interpreter, "interpreter_semantic", None) or TritonSemantic(builder)
            inner = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

            def known(*args, **kwargs):
                kwargs["_semantic"] = semantic
                return inner(*args, **kwargs)

            made[member] = known
        scope.set_attr(package, name, known)

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

    interpreter._patch_attr, interpreter._patch_builtin = replace_attr, replace_builtins
    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew
