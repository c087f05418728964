"""The caller's arrays: what they are, their bytes into an arena, and arena memory back as an array of their kind.

NumPy, torch, JAX and the like are recognised without importing them: an array of a library that was never imported
cannot exist. Called on every op, so the common kinds take a short path.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from ctypes import byref, c_char, c_int, c_ssize_t, c_void_p, py_object
from typing import Any, Literal

from layerzero.client.dlpack import DLPackView, read_dlpack
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.tensors import ITEMSIZE, MAX_NDIM, TensorSpec, contiguous_strides

Kind = Literal["numpy", "torch", "dlpack", "buffer", "cupy"]
ACCEPTED = "a NumPy array, a torch tensor, an array with DLPack (CuPy, JAX, MLX, ...) or one with the buffer protocol"
CPU = -1  # as a device


class Array:
    """One argument of an op.

    `spec` describes the elements from `address` on. With `needs_copy` they cannot be described (negative strides,
    strides that split an element, misaligned data): `spec` is then that of the row-major copy which `copy_into`
    makes. `nbytes` is the size of such a copy in any case. The memory is valid while `owner` lives; `obj` is what
    the caller passed. `device` is the ordinal of the GPU that the memory is on, or CPU.
    """

    __slots__ = (
        "address",
        "device",
        "kind",
        "nbytes",
        "needs_copy",
        "obj",
        "owner",
        "requires_grad",
        "spec",
        "writable",
    )

    def __init__(
        self,
        kind: Kind,
        spec: TensorSpec,
        address: int,
        obj: Any,
        owner: Any,
        requires_grad: bool = False,
        writable: bool = True,
        needs_copy: bool = False,
        device: int = CPU,
    ) -> None:
        self.device = device
        self.kind = kind
        self.spec = spec
        self.address = address
        self.nbytes = spec.numel * ITEMSIZE[spec.dtype]
        self.obj = obj
        self.owner = owner
        self.requires_grad = requires_grad
        self.writable = writable
        self.needs_copy = needs_copy

    def __repr__(self) -> str:
        return f"Array({self.kind}, {self.spec}, strides={list(self.spec.strides)}, needs_copy={self.needs_copy})"


def describe(obj: Any) -> Array:
    """What `obj` is. Nothing is copied. Raises InvalidArgument for anything that is not plain numbers in the memory of
    the CPU or of an NVIDIA GPU."""
    reader = _READERS.get(type(obj))
    if reader is None:
        reader = _find_reader(obj)
    return reader(obj)


def copy_into(array: Array, dst: memoryview) -> None:
    """Write the elements into `dst` (writable bytes, `array.nbytes` or more) in row-major order, bit for bit."""
    if array.nbytes == 0:
        return
    is_dense = array.spec.is_contiguous and not array.needs_copy
    if is_dense and (array.nbytes <= _MEMMOVE_MAX or array.kind == "dlpack"):
        if dst.nbytes < array.nbytes:
            raise ValueError(f"{array.nbytes} bytes do not fit into {dst.nbytes}")
        ctypes.memmove(_address_of(dst), array.address, array.nbytes)
    elif array.kind == "torch":
        _copy_torch(array, dst)
    elif array.kind == "numpy":
        _copy_numpy(array.owner, dst)
    elif array.kind == "buffer":
        dst[: array.nbytes] = array.owner.cast("B") if is_dense else array.owner.tobytes()
    else:
        _copy_numpy(_strided_dlpack(array.owner), dst)


def wrap(memory: memoryview, spec: TensorSpec, like: Array) -> tuple[Any, bool]:
    """An array of the same kind as `like` over `memory`, and whether its bytes had to be copied.

    Without a copy the array and every view made from it keep this very `memory` object alive, and nothing else
    does: a weak reference to it dies with the last of them. `memory` is writable and covers the span of `spec`.
    """
    match like.kind:
        case "torch":
            return _wrap_torch(memory, spec), False
        case "numpy":
            return _numpy_view(memory, spec), False
        case "buffer":
            return _wrap_buffer(memory, spec), False
        case _:
            result = _wrap_dlpack(memory, spec, like.obj)
            return result, spec.numel > 0 and describe(result).address != _address_of(memory)


# --- specs


_SPECS: dict[tuple[Any, ...], TensorSpec] = {}
_SPECS_MAX = 8192


def intern_spec(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorSpec:
    """The one TensorSpec object of these values, so that dictionaries find it by identity."""
    key = (dtype, shape, strides)
    return _SPECS.get(key) or _remember(key, TensorSpec(dtype, tuple(shape), tuple(strides)))


def _remember(key: tuple[Any, ...], spec: TensorSpec) -> TensorSpec:
    if len(_SPECS) >= _SPECS_MAX:  # shapes come and go; forgetting them costs one slow call each
        _SPECS.clear()
    return _SPECS.setdefault(key, spec)


def _check_ndim(ndim: int) -> None:
    if ndim > MAX_NDIM:
        raise InvalidArgument(f"array has {ndim} dimensions; allowed: at most {MAX_NDIM}; reshape it")


def _from_bytes_strides(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[TensorSpec, bool]:
    """Spec of an array with strides in bytes, and whether those cannot be described in elements."""
    _check_ndim(len(shape))
    size = ITEMSIZE[dtype]
    # The stride of an extent of 1 never counts; libraries leave anything there.
    steps = tuple(s if n > 1 else c * size for n, s, c in zip(shape, strides, contiguous_strides(shape), strict=True))
    if any(s < 0 or s % size for s in steps):
        return intern_spec(dtype, shape, contiguous_strides(shape)), True
    return intern_spec(dtype, shape, tuple(s // size for s in steps)), False


# --- recognising


def _find_reader(obj: Any) -> Callable[[Any], Array]:
    """The reader for an object whose exact type is not known yet."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    # A library that is just being imported is in sys.modules without its names.
    if torch is not None and isinstance(obj, getattr(torch, "Tensor", ())):
        if not _TORCH_NAMES:
            _TORCH_NAMES.update({getattr(torch, name): name for name in ITEMSIZE if hasattr(torch, name)})
            _READERS[torch.Tensor] = _READERS[torch.nn.Parameter] = _describe_torch
        return _READERS.get(type(obj), _describe_torch_subclass)
    if numpy is not None and isinstance(obj, (getattr(numpy, "ndarray", ()), getattr(numpy, "generic", ()))):
        _READERS[numpy.ndarray] = _describe_numpy
        return _READERS.get(type(obj), _describe_numpy_like)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(obj, getattr(cupy, "ndarray", ())):
        _READERS[cupy.ndarray] = _describe_cupy
        return _describe_cupy
    if hasattr(type(obj), "__dlpack__"):
        return _describe_dlpack
    return _describe_buffer


def _describe_torch(tensor: Any) -> Array:
    dtype, shape = tensor.dtype, tensor.shape
    try:
        strides, address = tensor.stride(), tensor.data_ptr()
    except RuntimeError:  # a layout without strides, or a wrapper without memory
        raise _refuse_torch(tensor) from None
    spec = _SPECS.get((dtype, shape, strides)) or _torch_spec(tensor)
    device = CPU
    if not tensor.is_cpu:
        if not tensor.is_cuda:
            raise _refuse_torch(tensor)
        device = tensor.get_device()
    if address == 0 and spec.numel:
        raise _refuse_torch(tensor)
    if tensor.is_neg():  # torch negates such a tensor lazily: its bytes have the wrong sign
        return _describe_torch(tensor.resolve_neg())
    return Array("torch", spec, address, tensor, tensor, tensor.requires_grad, device=device)


def _torch_spec(tensor: Any) -> TensorSpec:
    name = _TORCH_NAMES.get(tensor.dtype)
    if name is None or str(tensor.layout) != "torch.strided" or tensor.is_nested:
        raise _refuse_torch(tensor)
    _check_ndim(tensor.dim())
    shape, strides = tuple(tensor.shape), tensor.stride()
    return _remember((tensor.dtype, shape, strides), intern_spec(name, shape, strides))


def _refuse_torch(tensor: Any) -> InvalidArgument:
    """The error that says why this tensor has no plain numbers in CPU memory."""
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.device.type not in ("cpu", "cuda"):
        return InvalidArgument(f"torch tensor is on device {tensor.device}; allowed: cpu, cuda; call .cpu() first")
    if layout != "strided" or tensor.is_nested:
        return InvalidArgument(
            f"torch tensor has layout {'nested' if tensor.is_nested else layout}; allowed: strided; "
            "call .to_dense() or .to_padded_tensor() first"
        )
    if tensor.dtype not in _TORCH_NAMES:
        return InvalidArgument(
            f"torch tensor has dtype {str(tensor.dtype).removeprefix('torch.')}; allowed: {', '.join(ITEMSIZE)}; "
            "convert it with .to(), or .dequantize() when it is quantized"
        )
    return InvalidArgument(
        f"torch tensor of type {type(tensor).__name__} has no memory of its own (a wrapper of torch.func or vmap, a "
        "fake tensor, or freed storage); allowed: plain tensors; call LayerZero outside of the transformation"
    )


def _describe_torch_subclass(tensor: Any) -> Array:
    torch = sys.modules["torch"]
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InvalidArgument(
            f"torch tensor of type {type(tensor).__name__} wraps other tensors; allowed: plain tensors and subclasses "
            "without __torch_dispatch__; pass the tensor inside (.full_tensor(), .dequantize() or the like)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        array = _describe_torch(tensor.as_subclass(torch.Tensor))
    array.obj = tensor
    return array


def _describe_numpy(array: Any) -> Array:
    dtype = array.dtype
    key = (dtype, array.shape, array.strides)
    spec = _SPECS.get(key)
    if spec is None:
        spec, needs_copy = _from_bytes_strides(_numpy_name(dtype), array.shape, array.strides)
        if needs_copy:
            return Array("numpy", spec, array.ctypes.data, array, array, False, array.flags.writeable, True)
        _remember(key, spec)
    if spec.is_contiguous:
        try:
            address = ctypes.addressof(c_char.from_buffer(array))  # six times as fast as array.ctypes.data
        except (TypeError, ValueError, BufferError):  # read-only, empty, or bfloat16
            pass
        else:
            return Array("numpy", spec, address, array, array, False, True, address % dtype.alignment != 0)
    address = array.ctypes.data
    return Array("numpy", spec, address, array, array, False, array.flags.writeable, address % dtype.alignment != 0)


def _describe_numpy_like(obj: Any) -> Array:
    """NumPy scalars and subclasses of ndarray."""
    numpy = sys.modules["numpy"]
    if isinstance(obj, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise InvalidArgument(
            "a NumPy masked array's mask would be ignored; allowed: plain arrays; call .filled(value) first"
        )
    array = _describe_numpy(numpy.asarray(obj))
    array.obj = obj
    return array


def _numpy_name(dtype: Any) -> str:
    name: str = dtype.name
    if name not in ITEMSIZE or dtype.kind not in "biufV" or (dtype.kind == "V" and name not in _ML_DTYPES):
        raise InvalidArgument(
            f"NumPy array has dtype {dtype}; allowed: {', '.join(ITEMSIZE)}; convert it with .astype()"
        )
    if not dtype.isnative:
        raise InvalidArgument(
            f"NumPy array has dtype {dtype.str} of the other byte order; allowed: native; "
            "convert it with .astype(x.dtype.newbyteorder('='))"
        )
    return name


def _describe_cupy(array: Any) -> Array:
    key = (array.dtype, array.shape, array.strides)
    spec, needs_copy, owner = _SPECS.get(key), False, array
    if spec is None:
        spec, needs_copy = _from_bytes_strides(_numpy_name(array.dtype), array.shape, array.strides)
        if needs_copy:
            owner = sys.modules["cupy"].ascontiguousarray(array)
        else:
            _remember(key, spec)
    return Array("cupy", spec, owner.data.ptr, array, owner, needs_copy=needs_copy, device=array.device.id)


def _describe_dlpack(obj: Any) -> Array:
    if array_namespace(obj) is None:
        raise InvalidArgument(
            f"{type(obj).__module__}.{type(obj).__qualname__} has DLPack but no __array_namespace__ to make the result "
            "with; pass a NumPy view (numpy.from_dlpack) or a torch tensor (torch.from_dlpack)"
        )
    wait = getattr(obj, "block_until_ready", None)  # JAX returns arrays before they are computed
    if wait is not None:
        wait()
    view = read_dlpack(obj)
    _check_ndim(len(view.shape))
    size = ITEMSIZE[view.dtype]
    spec, needs_copy = _from_bytes_strides(view.dtype, view.shape, tuple(s * size for s in view.strides))
    needs_copy = needs_copy or bool(view.address % size)
    return Array("dlpack", spec, view.address, obj, view, False, not view.is_read_only, needs_copy, view.device)


def _as_array(obj: Any) -> str:
    """What makes an array of it."""
    return "its .to_numpy()" if hasattr(obj, "to_numpy") else "numpy.asarray(...) of it"


def _describe_buffer(obj: Any) -> Array:
    try:
        view = memoryview(obj)
    except TypeError:
        raise InvalidArgument(
            f"{type(obj).__module__}.{type(obj).__qualname__} is no array; allowed: {ACCEPTED}; pass {_as_array(obj)}"
        ) from None
    name = _BUFFER_NAMES.get(view.format.lstrip(_NATIVE_PREFIXES))
    if name is None or ITEMSIZE[name] != view.itemsize:
        raise InvalidArgument(
            f"buffer has format {view.format!r}; allowed: {', '.join(sorted(_BUFFER_NAMES))} in native byte order; "
            "convert it, or view it as bytes"
        )
    spec, needs_copy = _from_bytes_strides(name, view.shape or (), view.strides or ())
    address = 0
    if spec.numel:
        address = _address_of(view) if not view.readonly and view.c_contiguous else _address_of_any(view)
    needs_copy = needs_copy or bool(view.suboffsets) or bool(address % view.itemsize)
    return Array("buffer", spec, address, obj, view, False, not view.readonly, needs_copy)


_READERS: dict[type, Callable[[Any], Array]] = dict.fromkeys((memoryview, bytes, bytearray), _describe_buffer)
_TORCH_NAMES: dict[Any, str] = {}  # torch.dtype -> name; filled when the first tensor is seen

# struct format -> dtype name; the size of "l" and "L" is the platform's
_BUFFER_NAMES = {
    "?": "bool",
    "c": "uint8",
    "e": "float16",
    "f": "float32",
    "d": "float64",
    **{code: f"int{8 * struct.calcsize(code)}" for code in "bhilqn"},
    **{code: f"uint{8 * struct.calcsize(code)}" for code in "BHILQN"},
}
_NATIVE_PREFIXES = "@=<" if sys.byteorder == "little" else "@=>"
_FORMATS: dict[str, Any] = {  # dtype name -> format for memoryview.cast, which takes one native character
    "bool": "?", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i",
    "uint64": "Q", "int64": "q", "float32": "f", "float64": "d",
}  # fmt: skip


# --- copying

_MEMMOVE_MAX = 1 << 19  # bytes; above, torch copies with several threads and is faster


def _copy_torch(array: Array, dst: memoryview) -> None:
    tensor, spec = array.owner, array.spec
    flat = _torch_flat(dst, tensor.dtype, array.nbytes)
    flat.view(spec.shape).copy_(tensor.detach() if array.requires_grad else tensor)


def _torch_flat(memory: memoryview, dtype: Any, nbytes: int) -> Any:
    torch = sys.modules["torch"]
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).view(dtype)


def _copy_numpy(source: Any, dst: memoryview) -> None:
    numpy = sys.modules["numpy"]
    numpy.copyto(numpy.ndarray(source.shape, source.dtype, buffer=dst), source)


def _strided_dlpack(view: DLPackView) -> Any:
    """NumPy array over strided memory of another library; integers stand for the elements."""
    numpy = _import_numpy("a strided array of this library")
    size = ITEMSIZE[view.dtype]
    # The lowest address is where NumPy wants to begin; negative strides reach below the first element.
    below = sum((n - 1) * s * size for n, s in zip(view.shape, view.strides, strict=True) if s < 0)
    above = sum((n - 1) * s * size for n, s in zip(view.shape, view.strides, strict=True) if s > 0) + size
    memory = (c_char * (above - below)).from_address(view.address + below)
    strides = tuple(s * size for s in view.strides)
    return numpy.ndarray(view.shape, f"u{size}", buffer=memory, offset=-below, strides=strides)


def _import_numpy(what: str) -> Any:
    try:
        import numpy
    except ImportError as exc:
        raise InvalidArgument(
            f"{what} needs NumPy, which is not installed; pass a contiguous array or install numpy"
        ) from exc
    return numpy


# --- wrapping


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


_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # NumPy has them of ml_dtypes
_TYPESTRS = {
    name: ("<" if sys.byteorder == "little" else ">")
    + ("u" if name in _ML_DTYPES or name == "float4_e2m1fn_x2" else name[0])
    + str(size)
    for name, size in ITEMSIZE.items()
}  # what NumPy does not have travels as unsigned integers


def _numpy_view(memory: memoryview, spec: TensorSpec) -> Any:
    numpy = sys.modules.get("numpy") or _import_numpy("this result")
    view = numpy.asarray(_Lent(memory, spec)) if spec.numel else numpy.empty(spec.shape, _TYPESTRS[spec.dtype])
    if spec.dtype == "float4_e2m1fn_x2":
        raise InvalidArgument("NumPy has no packed float4; pass a torch tensor")
    if spec.dtype not in _ML_DTYPES:
        return view
    ml_dtypes = sys.modules.get("ml_dtypes")
    if ml_dtypes is None:
        raise InvalidArgument(f"NumPy has no {spec.dtype} of its own; import ml_dtypes, or pass a torch tensor")
    return view.view(getattr(ml_dtypes, spec.dtype))


def _wrap_torch(memory: memoryview, spec: TensorSpec) -> Any:
    torch = sys.modules["torch"]
    dtype = getattr(torch, spec.dtype)
    if not spec.numel:  # torch.frombuffer refuses empty memory; there is nothing to keep alive
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="cpu")
    flat = _torch_flat(memory, dtype, spec.span_bytes)
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


def array_namespace(obj: Any) -> Any:
    """The library's functions by the array API's names, or None."""
    get = getattr(type(obj), "__array_namespace__", None)
    return None if get is None else get(obj)


def _wrap_dlpack(memory: memoryview, spec: TensorSpec, like: Any) -> Any:
    library = type(like).__module__.partition(".")[0]
    if library == "mlx":  # copies whatever it is given, and knows no bfloat16 from outside
        return _mlx_array(memory, spec)
    view = _numpy_view(memory, spec)
    namespace = array_namespace(like)
    if spec.dtype in _ML_DTYPES:  # NumPy does not export them
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


# --- addresses


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


def _address_of(memory: memoryview) -> int:
    """Address of writable contiguous memory that is not empty."""
    return ctypes.addressof(c_char.from_buffer(memory))


def _address_of_any(memory: memoryview) -> int:
    """Address of the first element of any memory."""
    buffer = _PyBuffer()
    _get_buffer(memory, byref(buffer), _FULL_READ_ONLY)
    try:
        return buffer.buf or 0
    finally:
        _release_buffer(byref(buffer))
