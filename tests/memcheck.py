"""Triton's interpreter with a guard of memory: what a kernel reads or writes belongs to its tensors, and is aligned.

On a GPU an access outside of all memory, or one that is not aligned, is an error, and one into a neighbour's memory is
seen by compute-sanitizer. The interpreter takes addresses as they come: it would return whatever stands there.
"""

import contextlib
import os
import threading

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

_here = threading.local()

#: Whether somebody asks for it; GUARD=1 does in all tests.
asked = []


@contextlib.contextmanager
def guarded():
    """Inside, kernels that are interpreted are checked."""
    asked.append(True)
    try:
        yield
    finally:
        asked.pop()


def _memory(values, found):
    """The memory of all tensors among arguments, as pairs of first and last address."""
    for value in values:
        if isinstance(value, (tuple, list)):
            _memory(value, found)
        elif isinstance(value, TensorDescriptor):
            _memory([value.base], found)
            if len(value.shape) == 3:  # several matrices, one behind the other wherever they are: each is described
                size = value.base.element_size()
                reach = sum((n - 1) * s for n, s in zip(value.shape[1:], value.strides[1:], strict=True)) + 1
                for i in range(value.shape[0]):
                    start = value.base.data_ptr() + i * value.strides[0] * size
                    found.append((start, start + reach * size))
        elif hasattr(value, "data_ptr"):
            storage = interpreter._unwrap_tensor(value).untyped_storage()
            found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found


def _listed(given):
    """The memory whose addresses a table holds, as `fusebook.kernels.adamw` has it: sizes, then a row for each kind."""
    if not {"table_ptr", "grads_ptr", "tensors"} <= given.keys():
        return []
    tensors, grads = given["tensors"], given["grads_ptr"]
    sizes, *rows = given["table_ptr"][: 6 * tensors].view(6, tensors).tolist()
    rows.append(grads.tolist() if grads.dtype == torch.int64 else [grads.data_ptr()])
    kinds = [given["P"], given["S"], given["S"], given["S"], tl.float32, given["G"]]
    return [
        (start, start + n * kind.primitive_bitwidth // 8)
        for row, kind in zip(rows, kinds, strict=True)
        for start, n in zip(row, sizes, strict=True)
        if start
    ]


def _merged(ranges):
    """The same memory as ranges that lie apart, in their order."""
    apart = []
    for start, end in sorted(ranges):
        if apart and start <= apart[-1][1]:
            apart[-1][1] = max(apart[-1][1], end)
        else:
            apart.append([start, end])
    return apart


def _checked(what, pointers, mask, size, spare=0):
    """Refuse the first access that is none of the launch's; `spare` rounds where memory ends."""
    ranges = getattr(_here, "ranges", None)
    if ranges is None:
        return
    active = pointers[mask] if mask is not None else pointers.reshape(-1)
    if active.size == 0:
        return
    if size > 1 and (active & np.uint64(size - 1)).any():
        raise AssertionError(f"{what} of {size} bytes at an address that is no multiple of {size}")
    low, high = int(active.min()), int(active.max()) + size
    starts, ends = ranges
    if spare:
        ends = (ends + np.uint64(spare)) & ~np.uint64(spare)
    at = int(np.searchsorted(starts, low, "right")) - 1
    if at >= 0 and high <= ends[at]:
        return
    each = np.searchsorted(starts, active, "right").astype(np.int64) - 1
    wrong = (each < 0) | (active + np.uint64(size) > ends[each])
    if wrong.any():
        address = int(active[wrong][0])
        near = int(each[wrong][0])
        beside = f"{address - int(ends[near])} bytes behind the end of a tensor" if near >= 0 else "before all tensors"
        raise AssertionError(f"{what} of {size} bytes outside of the kernel's tensors: {beside}")


class _Guarded:
    """The interpreter's accesses of memory, each checked first."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def load(self, pointers, mask, other, dtype):
        _checked("a load", pointers, mask, np.dtype(dtype).itemsize, _here.spare if hasattr(_here, "spare") else 0)
        return self._inner.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        _checked("a store", pointers, mask, value.dtype.itemsize)
        return self._inner.store(pointers, value, mask)

    def atomic_rmw(self, operation, pointers, value, mask, sem):
        _checked("an atomic operation", pointers, mask, value.dtype.itemsize)
        return self._inner.atomic_rmw(operation, pointers, value, mask, sem)

    def atomic_cas(self, pointers, compare, value, sem):
        _checked("an atomic operation", pointers, None, value.dtype.itemsize)
        return self._inner.atomic_cas(pointers, compare, value, sem)


def guard():
    """Be there to check the memory accesses of kernels that are interpreted, where that is asked for."""
    if isinstance(interpreter._interpreter, _Guarded):
        return
    interpreter._interpreter = _Guarded(interpreter._interpreter)
    launch = interpreter.GridExecutor.__call__

    def guarded(self, *args, **kwargs):
        if not (asked or os.environ.get("GUARD")):
            return launch(self, *args, **kwargs)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        found = _merged(_memory([*args, *kwargs.values()], _listed(given)))
        # Kernels that take rows by whole vectors of 16 bytes read what lies in the first and last one beside the row,
        # and pass it over. Memory is allocated in larger pieces, so it is there.
        _here.spare = 15 if kwargs.get("VEC", 1) > 1 else 0
        before = getattr(_here, "ranges", None)
        _here.ranges = tuple(np.array([r[i] for r in found], dtype=np.uint64) for i in (0, 1))
        try:
            return launch(self, *args, **kwargs)
        finally:
            _here.ranges = before

    interpreter.GridExecutor.__call__ = guarded
