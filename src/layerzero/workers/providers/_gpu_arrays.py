"""Arrays on a GPU for users' functions: of the caller's library where this environment has it, else of torch, else of
CuPy, else an object that other libraries read. What they enqueue goes to the stream of the call."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, MAX_NDIM, TensorSpec
from layerzero.workers.functions.device import Found, Span
from layerzero.workers.provider import DeviceMemory
from layerzero.workers.providers import _dlpack

_TYPES = {"bool": "|b1", "float16": "<f2", "float32": "<f4", "float64": "<f8"}  # of the interface; further ones below
_TYPES |= {f"{kind}{bits}": f"<{kind[0]}{bits // 8}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_TYPES |= {"int8": "|i1", "uint8": "|u1"}
_NAMES = {text[1:]: name for name, text in _TYPES.items()}


class GpuLibraries:
    """As device.Libraries."""

    def __init__(self) -> None:
        self.streams: dict[tuple[str, int, int], tuple[Any, ...]] = {}  # by library, GPU and handle
        self._entered: _Entered | None = None  # of the present call

    def on_stream(self, stream: int, device: int) -> AbstractContextManager[None]:
        """As device.Libraries."""
        self._entered = entered = _Entered(self.streams, stream, device)
        return entered

    def open(self, library: str, spec: TensorSpec, span: Span, stream: int) -> Any:
        """As device.Libraries."""
        chosen = _chosen(library)
        if not chosen:
            return GpuMemory(spec, span, stream)
        assert self._entered is not None
        self._entered.enter(chosen)
        return _OPEN[chosen](spec, span)

    def enter(self) -> None:
        """As device.Libraries: those that are loaded, by the function's module for one; to load another one may take
        seconds."""
        assert self._entered is not None
        loaded = [library for library in _ENTER if library in sys.modules and _has_cuda(library)]
        for library in loaded or [_chosen("torch", "leave device= out")]:
            if library:
                self._entered.enter(library)

    def found(self, value: Any, device: int) -> Found | None:
        """As device.Libraries."""
        torch: Any = sys.modules.get("torch")
        cupy: Any = sys.modules.get("cupy")
        if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
            tensor: Any = value
            return _of_torch(tensor, device) if tensor.is_cuda else None
        if cupy is not None and isinstance(value, getattr(cupy, "ndarray", ())):
            return _of_cupy(cupy, value, device)
        return _of_interface(value) if hasattr(value, "__cuda_array_interface__") else None

    def writes_of(self, array: Any) -> int:
        """As device.Libraries: torch counts them, also those by views. Others do not tell."""
        try:
            return int(getattr(array, "_version", 0))
        except RuntimeError:  # of torch.inference_mode
            return 0


class _Entered(AbstractContextManager[None]):
    """One call, in which libraries enqueue on its stream. As an ExitStack, in a tenth of the time."""

    def __init__(self, streams: dict[tuple[str, int, int], tuple[Any, ...]], stream: int, device: int) -> None:
        self._streams, self._stream, self._device = streams, stream, device
        self._libraries: set[str] = set()
        self._inside: list[Any] = []

    def __enter__(self) -> None:
        try:
            for library in _ENTER:
                if library in sys.modules:
                    self.enter(library)
        except BaseException:
            self.__exit__()
            raise

    def enter(self, library: str) -> None:
        if library not in self._libraries and _has_cuda(library):
            self._libraries.add(library)
            key = (library, self._device, self._stream)
            found = self._streams.get(key)
            if found is None:
                found = self._streams[key] = _ENTER[library](self._stream, self._device)
            for one in found:
                entered = one() if callable(one) else one
                entered.__enter__()
                self._inside.append(entered)

    def __exit__(self, *_: object) -> None:
        """What a library raises is raised when all are left."""
        error: Exception | None = None
        while self._inside:
            try:
                self._inside.pop().__exit__(None, None, None)
            except Exception as exc:
                error = error or exc
        if error is not None:
            raise error


def _chosen(library: str, repair: str = "pass it with .cpu()") -> str:
    """What an array of this library is here; empty for none of those that we make arrays of. Raises
    InvalidArgument, with `repair`, where there are some and none can use a GPU."""
    able = []
    for one in dict.fromkeys((library, "torch", "cupy")):
        if _cuda.get(one):  # it is here: to look for others takes longer than the call
            return one
        if one in _OPEN and _is_there(one):
            able.append(one)
            if _has_cuda(one):
                return one
    if able:
        told = ", ".join(f"{one} {getattr(sys.modules.get(one), '__version__', '')}".rstrip() for one in able)
        text = f"{repair}, or have {' or '.join(able)} with CUDA in its environment"
        raise InvalidArgument(f"{text}: {told} there sees no GPU")
    return ""


def _is_there(library: str) -> bool:
    if library in sys.modules:
        return True
    try:
        return importlib.util.find_spec(library) is not None
    except (ImportError, ValueError):
        return False


def _has_cuda(library: str) -> bool:
    """Whether it can use a GPU here. It is imported."""
    known = _cuda.get(library)
    if known is None:
        try:
            known = bool(_imported(library).cuda.is_available())
        except Exception:  # whatever a library says where it finds no driver
            known = False
        _cuda[library] = known
    return known


_cuda: dict[str, bool] = {}


def _imported(library: str) -> Any:
    if library == "torch":
        import torch

        return torch
    import cupy

    return cupy


class _TorchStream:
    """As torch.cuda.stream, of whose time most goes into asking which GPU is meant."""

    def __init__(self, torch: Any, stream: Any) -> None:
        self._get, self._set = torch._C._cuda_getCurrentStream, torch._C._cuda_setStream
        self._device, self._set_device = torch._C._cuda_getDevice, torch._C._cuda_setDevice
        self._index = stream.device_index
        self._its = {name: getattr(stream, name) for name in _OF_STREAM}
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> None:
        self._before.append((self._device(), self._get(self._index)))
        self._set(**self._its)

    def __exit__(self, *_: object) -> None:
        device, before = self._before.pop()
        self._set(**dict(zip(_OF_STREAM, before, strict=True)))
        if device != self._index:
            self._set_device(device)


_OF_STREAM = ("stream_id", "device_index", "device_type")


def _torch_stream(stream: int, device: int) -> tuple[Any, ...]:
    torch = sys.modules["torch"]
    made = torch.cuda.ExternalStream(stream, device=device)
    current = torch._C._cuda_getCurrentStream(device)
    if isinstance(current, tuple) and len(current) == len(_OF_STREAM) and all(hasattr(made, n) for n in _OF_STREAM):
        return (_TorchStream(torch, made),)
    return (lambda: torch.cuda.stream(made),)  # of torch 1


def _cupy_stream(stream: int, device: int) -> tuple[Any, ...]:
    cupy = sys.modules["cupy"]
    made = cupy.cuda.ExternalStream(stream, device)
    return (lambda: cupy.cuda.Device(device), lambda: made)


_ENTER: dict[str, Callable[[int, int], tuple[Any, ...]]] = {"torch": _torch_stream, "cupy": _cupy_stream}


def _to_torch(spec: TensorSpec, span: Span) -> Any:
    torch = sys.modules["torch"]
    dtype = getattr(torch, spec.dtype, None)
    if dtype is None:
        raise InvalidArgument(f"torch {torch.__version__} of this environment has no {spec.dtype}")
    if not spec.numel:
        return torch.empty(spec.shape, dtype=dtype, device=torch.device("cuda", span.device))
    key = (span.pointer, span.nbytes, span.device, spec.dtype)
    flat = _flats.get(key)
    if flat is None:
        flat = torch.as_tensor(_Bytes(span), device=torch.device("cuda", span.device))  # the interface has no bfloat16
        if flat.data_ptr() != span.pointer:
            raise InvalidArgument(f"torch {torch.__version__} of this environment copies what it is lent on a GPU")
        if len(_flats) >= MAX_FLATS:
            _flats.clear()
        flat = _flats[key] = flat.view(dtype)
    return flat.as_strided(spec.shape, spec.strides)


MAX_FLATS = 256
_flats: dict[tuple[int, int, int, str], Any] = {}
"""Tensors over memory that was lent, which own nothing, by address, bytes, GPU and dtype. Calls get views of their own;
writes to those are counted for all."""


class _Bytes:
    """What torch takes for memory."""

    def __init__(self, span: Span) -> None:
        told = {"shape": (span.nbytes,), "typestr": "|u1", "data": (span.pointer, False), "strides": None}
        self.__cuda_array_interface__ = {**told, "version": 3, "stream": None}  # its order is seen to


def _to_cupy(spec: TensorSpec, span: Span) -> Any:
    cupy = sys.modules["cupy"]
    try:
        dtype = cupy.dtype(spec.dtype)
    except TypeError as exc:
        raise InvalidArgument(f"CuPy {cupy.__version__} of this environment has no {spec.dtype}") from exc
    if not spec.numel:
        return cupy.empty(spec.shape, dtype)
    memory = cupy.cuda.UnownedMemory(span.pointer, span.nbytes, span, span.device)
    strides = tuple(step * spec.itemsize for step in spec.strides)
    return cupy.ndarray(spec.shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0), strides=strides)


_OPEN: dict[str, Callable[[TensorSpec, Span], Any]] = {"torch": _to_torch, "cupy": _to_cupy}


class GpuMemory:
    """An array on a GPU in an environment that has neither torch nor CuPy: numba, JAX and others read it, by
    __cuda_array_interface__ or DLPack. It is read-only, and the call's alone."""

    def __init__(self, spec: TensorSpec, span: Span, stream: int) -> None:
        self.shape, self.dtype, self._spec, self._span, self._stream = spec.shape, spec.dtype, spec, span, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        spec = self._spec
        if spec.dtype not in _TYPES:
            raise AttributeError(f"__cuda_array_interface__ has no {spec.dtype}; read it by DLPack")
        strides = None if spec.is_contiguous else tuple(step * spec.itemsize for step in spec.strides)
        pointer = self._span.pointer if spec.numel else 0
        found = {"shape": spec.shape, "typestr": _TYPES[spec.dtype], "data": (pointer, True), "strides": strides}
        return {**found, "version": 3, "stream": self._stream}

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CUDA, self._span.device

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """Waits until the stream of the call has come here, since others' streams are not known."""
        from layerzero.ipc.cuda import driver

        if not self._spec.is_contiguous:
            raise BufferError(f"{self._spec} has strides, which this DLPack does not give")
        if stream != -1:
            driver.load().synchronize_stream(self._stream)
        span = self._span
        return _dlpack.capsule(DeviceMemory(span.pointer, span.nbytes, span.device), self._spec)


# Results


def _of_torch(value: Any, device: int) -> Found:
    torch = sys.modules["torch"]
    name = _dtype_names.get(value.dtype)
    if name is None:
        name = _dtype_names[value.dtype] = str(value.dtype).removeprefix("torch.")
    if name not in ITEMSIZE or value.layout is not torch.strided:
        text = f"a {value.layout} tensor of {name} on {value.device}"
        raise InvalidArgument(f"{text}; allowed: dense ones of {', '.join(ITEMSIZE)}")
    _demand_device(int(value.get_device()), device)
    is_plain = not (value.requires_grad or value.is_conj() or value.is_neg()) and value.is_contiguous()
    dense = value if is_plain else value.detach().resolve_conj().resolve_neg().contiguous()
    return Found(_spec(name, tuple(dense.shape)), int(dense.data_ptr()), dense)


_dtype_names: dict[Any, str] = {}


def _of_cupy(cupy: Any, value: Any, device: int) -> Found:
    if value.dtype.name not in ITEMSIZE:
        raise InvalidArgument(f"a CuPy array of {value.dtype}; allowed: {', '.join(ITEMSIZE)}")
    _demand_device(int(value.device.id), device)
    dense = cupy.ascontiguousarray(value)
    return Found(_spec(value.dtype.name, tuple(value.shape)), int(dense.data.ptr), dense)


def _of_interface(value: Any) -> Found:
    if hasattr(value, "block_until_ready"):
        value.block_until_ready()  # JAX, whose stream nobody knows
    told = value.__cuda_array_interface__
    name, shape = _NAMES.get(told["typestr"][1:]), tuple(map(int, told["shape"]))
    if name is None or told["typestr"][0] == ">":
        raise InvalidArgument(f"an array on a GPU of {told['typestr']}; allowed: {', '.join(_TYPES)}")
    spec = _spec(name, shape)
    strides = told.get("strides")
    if strides is not None and spec.numel and tuple(strides) != tuple(step * spec.itemsize for step in spec.strides):
        raise InvalidArgument(f"an array on a GPU with strides {tuple(strides)}; return a contiguous copy")
    return Found(spec, int(told["data"][0] or 0), value, int(told.get("stream") or 0))


def _demand_device(own: int, device: int) -> None:
    if device >= 0 and own != device:
        raise InvalidArgument(f"an array on cuda:{own}, where the call is on cuda:{device}; move it there")


@functools.lru_cache(maxsize=1024)
def _spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    if len(shape) > MAX_NDIM:
        raise InvalidArgument(f"an array of {len(shape)} dimensions; allowed: at most {MAX_NDIM}; reshape it")
    return TensorSpec.contiguous(dtype, shape)
