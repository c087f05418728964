"""DLPack capsules by ctypes: arrays of any library are taken, and memory on a GPU is given, without importing it.

Layout and ownership rules: https://dmlc.github.io/dlpack/latest/c_api.html and .../python_spec.html, versions 0 and 1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import contiguous_strides

_MAX_MAJOR = 1
_READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags
_CPU, CUDA, _CUDA_HOST = 1, 2, 3
_ON_CPU = -1  # as DLPackView.device
NOT_SHARED = "DEVICE_MEMORY_NOT_SHARED"  # why an array on another device is refused
_DEVICES = {_CPU: "cpu", 2: "cuda", _CUDA_HOST: "cuda pinned host", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm",
            11: "rocm pinned host", 13: "cuda managed", 14: "oneapi"}  # fmt: skip
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_FLOAT8_E4M3FN, _FLOAT8_E5M2 = 10, 12
_DTYPES = {
    (_BOOL, 8): "bool",
    **{(_INT, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(_UINT, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(_FLOAT, bits): f"float{bits}" for bits in (16, 32, 64)},
    (_BFLOAT, 16): "bfloat16",
    (_FLOAT8_E4M3FN, 8): "float8_e4m3fn",
    (_FLOAT8_E5M2, 8): "float8_e5m2",
}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    ]


# Capsule names are compared and stored by address: these bytes live as long as the module.
_NAME, _USED = b"dltensor", b"used_dltensor"
_NAME_VERSIONED, _USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"

_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, py_object, c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
# The GIL stays held: producers acquire it themselves when they need it, and some assume that it is.
_DELETER = ctypes.PYFUNCTYPE(None, c_void_p)


class Owner:
    """Holds a tensor taken from a capsule; gives it back to its producer when it dies."""

    __slots__ = ("_deleter", "_pointer")

    def __init__(self, pointer: int, deleter: int | None) -> None:
        self._pointer = pointer
        self._deleter = _DELETER(deleter) if deleter else None  # a producer may have nothing to delete

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._pointer)


@dataclass(frozen=True, slots=True)
class DLPackView:
    """Memory of another library. `address` is that of the first element; strides are in elements and may be negative.
    The memory is valid while `owner` lives. `device`: the ordinal of a GPU, or -1."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_read_only: bool
    owner: Owner
    device: int = _ON_CPU


def read_dlpack(obj: Any, stream: int | None = None) -> DLPackView:
    """Take the tensor that `obj` exports. On a GPU its contents are there for work of `stream`, a CUDA handle; None: of
    the default stream. Raises InvalidArgument when it is not plain numbers in the memory of the CPU or an NVIDIA GPU.
    """
    what = f"{type(obj).__module__}.{type(obj).__qualname__}"
    try:
        device = int(obj.__dlpack_device__()[0])
    except Exception as exc:  # each library raises its own: a tracer has no memory, a sharded array has several
        raise InvalidArgument(
            f"{what} has no memory to read ({type(exc).__name__}: {exc!s:.200}); pass a concrete array on one device"
        ) from exc
    _check_device(what, device)
    try:
        capsule = _export(obj, stream)
    except Exception as exc:
        raise InvalidArgument(
            f"{what} cannot be exported by DLPack ({type(exc).__name__}: {exc!s:.200}); "
            "pass a NumPy array or torch tensor"
        ) from exc
    return _take(capsule, what)


def _export(obj: Any, stream: int | None) -> object:
    options = {} if stream is None else {"stream": stream}
    try:
        return obj.__dlpack__(max_version=(_MAX_MAJOR, 0), **options)
    except TypeError:  # a producer from before version 1 knows no such argument
        return obj.__dlpack__(**options)


def _take(capsule: object, what: str) -> DLPackView:
    """Move the tensor out of the capsule: rename it, so that it will not delete the tensor, and own it from here."""
    if _is_valid(capsule, _NAME_VERSIONED):
        pointer = _get_pointer(capsule, _NAME_VERSIONED)
        versioned = _ManagedVersioned.from_address(pointer)
        if versioned.major > _MAX_MAJOR:  # the fields behind the deleter may be laid out in another way
            raise InvalidArgument(
                f"{what} exports DLPack {versioned.major}.{versioned.minor}; readable: up to {_MAX_MAJOR}.x; "
                "pass a NumPy array or torch tensor"
            )
        _set_name(capsule, _USED_VERSIONED)
        owner, tensor = Owner(pointer, versioned.deleter), versioned.tensor
        is_read_only = bool(versioned.flags & _READ_ONLY)
    elif _is_valid(capsule, _NAME):
        pointer = _get_pointer(capsule, _NAME)
        managed = _Managed.from_address(pointer)
        _set_name(capsule, _USED)
        owner, tensor, is_read_only = Owner(pointer, managed.deleter), managed.tensor, False
    else:
        raise InvalidArgument(f"{what}.__dlpack__() returned {capsule!r:.80}, not an unused DLPack capsule")

    _check_device(what, tensor.device_type)
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise InvalidArgument(
            f"{what} has DLPack dtype (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes); "
            f"allowed: {', '.join(_DTYPES.values())}; convert it first"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape)
    ordinal = tensor.device_id if tensor.device_type == CUDA else _ON_CPU
    return DLPackView((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, is_read_only, owner, ordinal)


def _check_device(what: str, device: int) -> None:
    if device not in (_CPU, CUDA, _CUDA_HOST):
        name = _DEVICES.get(device, "unknown")
        raise InvalidArgument(
            f"{what} is on DLPack device {name} ({device}), whose memory is not shared with workers; allowed: cpu (1), "
            "cuda (2), cuda pinned host (3); move it to the CPU first",
            device=name,
            reason=NOT_SHARED,
        )


class GpuExport:
    """Memory on a GPU, for a library that takes DLPack. Contiguous; `hold` is let go of once nobody uses it."""

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: tuple[int, ...],
        device: int,
        ready: Callable[[int | None], None],
        hold: Any,
    ) -> None:
        """`ready(stream)`: make the consumer's stream wait for the contents."""
        self._device, self._ready = device, ready
        extents = (c_int64 * max(len(shape), 1))(*shape)
        steps = (c_int64 * max(len(shape), 1))(*contiguous_strides(shape))
        managed = _Managed()
        code, bits = next(key for key, name in _DTYPES.items() if name == dtype)
        tensor = managed.tensor
        tensor.data, tensor.device_type, tensor.device_id, tensor.ndim = address, CUDA, device, len(shape)
        tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset = code, bits, 1, 0
        tensor.shape = ctypes.cast(extents, POINTER(c_int64))
        tensor.strides = ctypes.cast(steps, POINTER(c_int64))
        managed.deleter = ctypes.cast(_let_go, c_void_p).value
        self._managed = managed
        self._exported = (managed, extents, steps, hold)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, self._device)

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        """Once: the memory then belongs to whoever takes the capsule."""
        self._ready(stream)
        address = ctypes.addressof(self._managed)
        _exports[address] = self._exported
        return _new_capsule(address, _NAME, None)


_exports: dict[int, Any] = {}  # what foreign libraries hold, by the address of its DLManagedTensor
_new_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


def _forget(address: int) -> None:
    _exports.pop(address, None)


_let_go = ctypes.CFUNCTYPE(None, c_void_p)(_forget)  # takes the GIL, which XLA's threads do not hold
