"""Arena memory as an array of the caller's library, which keeps it alive."""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import c_char
from typing import Any

from layerzero.client.arrays.addresses import address_of
from layerzero.client.arrays.recognition import ML_DTYPES, Array, array_namespace, describe
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

_FORMATS: dict[str, Any] = {  # dtype name -> format for memoryview.cast, which takes one native character
    "bool": "?", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i",
    "uint64": "Q", "int64": "q", "float32": "f", "float64": "d",
}  # fmt: skip


def wrap(memory: memoryview, spec: TensorSpec, like: Array) -> tuple[Any, bool]:
    """An array of the same kind as `like` over `memory`, and whether its bytes had to be copied.

    Without a copy the array and every view made from it keep this very `memory` object alive, and nothing else
    does: a weak reference to it dies with the last of them. `memory` is writable and covers the span of `spec`.
    """
    match like.kind:
        case "torch":
            return wrap_torch(memory, spec), False
        case "numpy":
            return _numpy_view(memory, spec), False
        case "buffer":
            return _wrap_buffer(memory, spec), False
        case _:
            result = _wrap_dlpack(memory, spec, like.obj)
            return result, spec.numel > 0 and describe(result).address != address_of(memory)


class _Lent:
    """Hands `memory` to NumPy so that the array's base is that very object.

    `numpy.ndarray(buffer=memory)` and `numpy.frombuffer(memory)` keep the object behind the memoryview instead.
    """

    __slots__ = ("__array_interface__",)

    def __init__(self, memory: memoryview, spec: TensorSpec) -> None:
        strides = None if spec.is_contiguous else tuple(s * ITEMSIZE[spec.dtype] for s in spec.strides)
        self.__array_interface__ = {
            "version": 3,
            "data": memory,
            "shape": spec.shape,
            "typestr": _TYPESTRS[spec.dtype],
            "strides": strides,
        }


_TYPESTRS = {
    name: ("<" if sys.byteorder == "little" else ">")
    + ("u" if name in ML_DTYPES or name == "float4_e2m1fn_x2" else name[0])
    + str(size)
    for name, size in ITEMSIZE.items()
}  # what NumPy does not have travels as unsigned integers


def _numpy_view(memory: memoryview, spec: TensorSpec) -> Any:
    numpy = sys.modules.get("numpy") or import_numpy("this result")
    view = numpy.asarray(_Lent(memory, spec)) if spec.numel else numpy.empty(spec.shape, _TYPESTRS[spec.dtype])
    if spec.dtype == "float4_e2m1fn_x2":
        raise InvalidArgument("NumPy has no packed float4; pass a torch tensor")
    if spec.dtype not in ML_DTYPES:
        return view
    ml_dtypes = sys.modules.get("ml_dtypes")
    if ml_dtypes is None:
        raise InvalidArgument(f"NumPy has no {spec.dtype} of its own; import ml_dtypes, or pass a torch tensor")
    return view.view(getattr(ml_dtypes, spec.dtype))


def wrap_torch(memory: Any, spec: TensorSpec) -> Any:
    """As `wrap`, of anything with the buffer protocol."""
    torch = sys.modules["torch"]
    dtype = getattr(torch, spec.dtype)
    if not spec.numel:  # torch.frombuffer refuses empty memory; there is nothing to keep alive
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="cpu")
    flat = torch_flat(memory, dtype, spec.span_bytes)
    return flat.view(spec.shape) if spec.is_contiguous else flat.as_strided(spec.shape, spec.strides)


def _wrap_buffer(memory: memoryview, spec: TensorSpec) -> memoryview:
    """A memoryview over `memory`. One made from it directly would keep what is behind `memory`, not `memory`."""
    code = _FORMATS.get(spec.dtype)
    if code is None or not spec.is_contiguous or (spec.ndim > 1 and not spec.numel):  # memoryview.cast cannot
        return memoryview(_numpy_view(memory, spec))
    if not spec.numel:
        return memoryview(b"").cast(code)
    block = _array_type(spec.span_bytes).from_buffer(memory)
    block.keep = memory  # type: ignore[attr-defined]
    return memoryview(block).cast("B").cast(code, spec.shape)


@functools.lru_cache(maxsize=256)
def _array_type(nbytes: int) -> type[ctypes.Array[c_char]]:
    """Made once per size: ctypes needs microseconds to make a type, and the garbage collector to free it."""
    return c_char * nbytes


def _wrap_dlpack(memory: memoryview, spec: TensorSpec, like: Any) -> Any:
    library = type(like).__module__.partition(".")[0]
    if library == "mlx":  # copies whatever it is given, and knows no bfloat16 from outside
        return _mlx_array(memory, spec)
    view = _numpy_view(memory, spec)
    namespace = array_namespace(like)
    if spec.dtype in ML_DTYPES:  # NumPy does not export them
        return namespace.asarray(view)
    return namespace.from_dlpack(view)


def _mlx_array(memory: memoryview, spec: TensorSpec) -> Any:
    mx = sys.modules["mlx.core"]
    dtype = mx.bool_ if spec.dtype == "bool" else getattr(mx, spec.dtype)
    if not spec.numel:
        return mx.zeros(spec.shape, dtype=dtype)
    bits = memory[: spec.span_bytes].cast(_FORMATS[f"uint{8 * spec.itemsize}"])
    flat = mx.array(bits).view(dtype)
    return flat.reshape(spec.shape) if spec.is_contiguous else mx.as_strided(flat, spec.shape, spec.strides)


def import_numpy(what: str) -> Any:
    try:
        import numpy
    except ImportError as exc:
        raise InvalidArgument(
            f"{what} needs NumPy, which is not installed; pass a contiguous array or install numpy"
        ) from exc
    return numpy


def torch_flat(memory: Any, dtype: Any, nbytes: int) -> Any:
    torch = sys.modules["torch"]
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).view(dtype)
