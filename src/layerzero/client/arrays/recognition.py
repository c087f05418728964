"""What the caller's arrays are. NumPy, torch, JAX and the like are recognised without importing them: an array of a
library that was never imported cannot exist. Called on every op, so the common kinds take a short path.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from ctypes import c_char
from typing import Any, Literal

from layerzero.client.arrays.addresses import address_of, address_of_any
from layerzero.client.arrays.dlpack import NOT_SHARED, read_dlpack
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, MAX_NDIM, TensorSpec, contiguous_strides

Kind = Literal["numpy", "torch", "dlpack", "buffer", "cupy", "own"]
ACCEPTED = "a NumPy array, a torch tensor, an array with DLPack (CuPy, JAX, MLX, ...) or one with the buffer protocol"
CPU = -1  # as a device
ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # NumPy has them of ml_dtypes


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


def teach(kind: type, reader: Callable[[Any], Array]) -> None:
    """Objects of this very type are arrays, which `reader` describes."""
    _READERS[kind] = reader


def describe(obj: Any) -> Array:
    """What `obj` is. Nothing is copied. Raises InvalidArgument for anything that is not plain numbers in the memory of
    the CPU or of an NVIDIA GPU."""
    reader = _READERS.get(type(obj))
    if reader is None:
        reader = _find_reader(obj)
    return reader(obj)


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
        if not tensor.is_cuda or sys.modules["torch"].version.hip is not None:
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
    is_amd = tensor.device.type == "cuda" and sys.modules["torch"].version.hip is not None
    if tensor.device.type not in ("cpu", "cuda") or is_amd:
        which = f"{tensor.device}{' of ROCm' if is_amd else ''}"
        return InvalidArgument(
            f"torch tensor is on device {which}, whose memory is not shared with workers; allowed: cpu, cuda of "
            "NVIDIA; call .cpu() first",
            device=which,
            reason=NOT_SHARED,
        )
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
        "fake tensor, or freed storage); allowed: plain tensors; call LayerZero outside of the transformation, or "
        "import layerzero.torch and call torch.ops.layerzero there"
    )


def _describe_torch_subclass(tensor: Any) -> Array:
    torch = sys.modules["torch"]
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InvalidArgument(
            f"torch tensor of type {type(tensor).__name__} wraps other tensors; allowed: plain tensors and subclasses "
            "without __torch_dispatch__; pass the tensor inside (.full_tensor(), .dequantize() or the like), or, "
            "where torch traces a program, import layerzero.torch and call torch.ops.layerzero"
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
    if name not in ITEMSIZE or dtype.kind not in "biufV" or (dtype.kind == "V" and name not in ML_DTYPES):
        how = "pass its .real and .imag" if dtype.kind == "c" else "convert it with .astype()"
        raise InvalidArgument(f"NumPy array has dtype {dtype}; allowed: {', '.join(ITEMSIZE)}; {how}")
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
        address = address_of(view) if not view.readonly and view.c_contiguous else address_of_any(view)
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


def array_namespace(obj: Any) -> Any:
    """The library's functions by the array API's names, or None."""
    get = getattr(type(obj), "__array_namespace__", None)
    return None if get is None else get(obj)
