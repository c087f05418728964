"""The elements of the caller's arrays, copied into arena memory."""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_char
from typing import Any

from layerzero.client.arrays.addresses import address_of
from layerzero.client.arrays.dlpack import DLPackView
from layerzero.client.arrays.recognition import Array
from layerzero.client.arrays.wrapping import import_numpy, torch_flat
from layerzero.ipc.vocabulary.tensors import ITEMSIZE

_MEMMOVE_MAX = 1 << 19  # bytes; above, torch copies with several threads and is faster


def copy_into(array: Array, dst: memoryview) -> None:
    """Write the elements into `dst` (writable bytes, `array.nbytes` or more) in row-major order, bit for bit."""
    if array.nbytes == 0:
        return
    is_dense = array.spec.is_contiguous and not array.needs_copy
    if is_dense and (array.nbytes <= _MEMMOVE_MAX or array.kind == "dlpack"):
        if dst.nbytes < array.nbytes:
            raise ValueError(f"{array.nbytes} bytes do not fit into {dst.nbytes}")
        ctypes.memmove(address_of(dst), array.address, array.nbytes)
    elif array.kind == "torch":
        _copy_torch(array, dst)
    elif array.kind == "numpy":
        _copy_numpy(array.owner, dst)
    elif array.kind == "buffer":
        dst[: array.nbytes] = array.owner.cast("B") if is_dense else array.owner.tobytes()
    else:
        _copy_numpy(_strided_dlpack(array.owner), dst)


def _copy_torch(array: Array, dst: memoryview) -> None:
    tensor, spec = array.owner, array.spec
    flat = torch_flat(dst, tensor.dtype, array.nbytes)
    flat.view(spec.shape).copy_(tensor.detach() if array.requires_grad else tensor)


def _copy_numpy(source: Any, dst: memoryview) -> None:
    numpy = sys.modules["numpy"]
    numpy.copyto(numpy.ndarray(source.shape, source.dtype, buffer=dst), source)


def _strided_dlpack(view: DLPackView) -> Any:
    """NumPy array over strided memory of another library; integers stand for the elements."""
    numpy = import_numpy("a strided array of this library")
    size = ITEMSIZE[view.dtype]
    # The lowest address is where NumPy wants to begin; negative strides reach below the first element.
    below = sum((n - 1) * s * size for n, s in zip(view.shape, view.strides, strict=True) if s < 0)
    above = sum((n - 1) * s * size for n, s in zip(view.shape, view.strides, strict=True) if s > 0) + size
    memory = (c_char * (above - below)).from_address(view.address + below)
    strides = tuple(s * size for s in view.strides)
    return numpy.ndarray(view.shape, f"u{size}", buffer=memory, offset=-below, strides=strides)
