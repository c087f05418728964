"""Addresses of memory that Python objects lend by the buffer protocol."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_ssize_t, c_void_p, py_object


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer, stable ABI since 3.11."""

    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_void_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("suboffsets", c_void_p),
        ("internal", c_void_p),
    ]


_get_buffer = ctypes.PYFUNCTYPE(c_int, py_object, ctypes.POINTER(_PyBuffer), c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))
_FULL_READ_ONLY = 0x0100 | 0x0010 | 0x0008 | 0x0004  # PyBUF_FULL_RO: INDIRECT, STRIDES, ND, FORMAT


def address_of(memory: memoryview) -> int:
    """Address of writable contiguous memory that is not empty."""
    return ctypes.addressof(c_char.from_buffer(memory))


def address_of_any(memory: memoryview) -> int:
    """Address of the first element of any memory."""
    buffer = _PyBuffer()
    _get_buffer(memory, byref(buffer), _FULL_READ_ONLY)
    try:
        return buffer.buf or 0
    finally:
        _release_buffer(byref(buffer))
