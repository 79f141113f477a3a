"""ONNX graphs for tests, and what is said to an ONNX Runtime that is too old. Who imports this has both packages."""

import ctypes

import onnx.helper as oh
import onnxruntime
import torch

#: Whether this ONNX Runtime hands on no outputs of float8, and computes part of a norm of float64 in float32.
OLD = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32)

#: Numbers of onnx.TensorProto.
KINDS = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.bool: 9,
    torch.float16: 10, torch.float64: 11, torch.bfloat16: 16,
}  # fmt: skip


def model(nodes, inputs, outputs, shape=None):
    """A model of nodes from names with dtypes; every tensor has the shape, or any."""

    def infos(names):
        return [oh.make_tensor_value_info(name, KINDS[dtype], shape) for name, dtype in names.items()]

    graph = oh.make_graph(nodes, "g", infos(inputs), infos(outputs))
    opsets = [oh.make_opsetid("", 18), oh.make_opsetid("fusebook", 1)]
    return oh.make_model(graph, ir_version=10, opset_imports=opsets)


def one_node(name, inputs, outputs, domain="fusebook", **attributes):
    """A model of one node, of our domain unless another is named."""
    node = oh.make_node(name, list(inputs), list(outputs), domain=domain, **attributes)
    return model([node], inputs, outputs)


class ApiBase(ctypes.Structure):
    _fields_ = [("get_api", ctypes.c_void_p), ("get_version", ctypes.c_void_p)]


def registered_by_an_old_onnx_runtime(path):
    """What a library says to an ONNX Runtime that has only the first version of the API."""
    said = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def create_status(code, message):
        said.append(message.decode())
        return 1

    table = (ctypes.c_void_p * 300)(ctypes.cast(create_status, ctypes.c_void_p).value)

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    def get_api(version):
        return ctypes.addressof(table) if version == 1 else None

    @ctypes.CFUNCTYPE(ctypes.c_void_p)
    def get_version():
        return ctypes.addressof(old)

    old = ctypes.create_string_buffer(b"1.10.0")
    base = ApiBase(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(get_version, ctypes.c_void_p))
    library = ctypes.CDLL(str(path))
    library.RegisterCustomOps.restype = ctypes.c_void_p
    assert library.RegisterCustomOps(None, ctypes.byref(base))
    return said
