"""DLPack capsules over GPU memory, and the address in one. Used by jax_cuda.py, whose library takes no bare address.

Source: dlpack.h, version 0.8; capsules that are not versioned, which every library reads.
"""

from __future__ import annotations

import ctypes
from typing import Any

from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import DeviceMemory

CUDA = 2  # kDLCUDA
_NAME = b"dltensor"
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # NULL: row-major without gaps
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_malloc = ctypes.CDLL(None).malloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
# Libraries call it from threads of their own, also when the interpreter has ended, so it must not be Python.
_FREE = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)


def capsule(memory: DeviceMemory, spec: TensorSpec) -> Any:
    """Of a dense tensor. Whoever consumes it frees the description; the memory stays the caller's."""
    place = _malloc(ctypes.sizeof(_Managed) + 8 * spec.ndim)
    if not place:
        raise MemoryError("no memory for the description of a tensor")
    shape = (ctypes.c_int64 * spec.ndim).from_address(place + ctypes.sizeof(_Managed))
    shape[:] = list(spec.shape)
    managed = _Managed.from_address(place)
    managed.tensor = _Tensor(
        data=memory.pointer,
        device_type=CUDA,
        device_id=memory.device,
        ndim=spec.ndim,
        code=_CODES[spec.dtype.rstrip("0123456789")],
        bits=8 * spec.itemsize,
        lanes=1,
        shape=shape,
    )
    managed.context, managed.deleter = None, _FREE
    return _new(place, _NAME, None)


def address(capsule: Any) -> int:
    """Of the first element of a capsule that nobody has consumed."""
    tensor = ctypes.cast(_pointer(capsule, _NAME), ctypes.POINTER(_Tensor)).contents
    return int(tensor.data or 0) + int(tensor.byte_offset)
