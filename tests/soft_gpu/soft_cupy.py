"""As much of CuPy as the client looks at, over the GPU of soft_gpu.py. `install()` makes it `sys.modules["cupy"]`."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tests.soft_gpu import soft_gpu
from tests.soft_gpu.soft_gpu import driver

from layerzero.ipc.vocabulary.tensors import TensorSpec, contiguous_strides


class _Pointer(NamedTuple):
    ptr: int
    block: object  # kept for as long as somebody points into it
    device_id: int = 0

    def __add__(self, nbytes: int) -> _Pointer:  # type: ignore[override]
        return self._replace(ptr=self.ptr + nbytes)


class _Device(NamedTuple):
    id: int


class Graph:
    """What a stream was told while it was captured."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        weakref.finalize(self, driver.destroy_graph, handle).atexit = False

    def launch(self, stream: _Stream | None = None) -> None:
        driver.launch_graph(self._handle, (stream or current()).ptr)


class _Stream(NamedTuple):
    ptr: int

    def begin_capture(self) -> None:
        driver.begin_capture(self.ptr)

    def end_capture(self) -> Graph:
        return Graph(driver.end_capture(self.ptr))

    def synchronize(self) -> None:
        driver.synchronize_stream(self.ptr)


class _Streams(threading.local):
    """Those that a thread uses, innermost last."""

    def __init__(self) -> None:
        self.used = [0]


_streams = _Streams()
_free: dict[tuple[int, int], list[int]] = {}  # by size and stream: memory comes back to the stream that it was freed in


class ndarray:  # CuPy's own name
    """Strided memory of the GPU."""

    def __init__(self, shape: Any, dtype: Any, memptr: _Pointer, strides: Any) -> None:
        self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), memptr
        self.strides, self.device = tuple(strides), _Device(0)

    def _view(self) -> np.ndarray:
        step = self.dtype.itemsize
        spec = TensorSpec(self.dtype.name, self.shape, tuple(stride // step for stride in self.strides))
        view: np.ndarray = soft_gpu.array_at(self.data.ptr, spec)
        return view

    def __getitem__(self, key: Any) -> ndarray:
        fake = np.lib.stride_tricks.as_strided(np.empty(1, self.dtype), self.shape, self.strides)
        part = fake[key]
        offset = part.__array_interface__["data"][0] - fake.__array_interface__["data"][0]
        return ndarray(part.shape, self.dtype, _Pointer(self.data.ptr + offset, self.data.block), part.strides)

    def __setitem__(self, key: Any, values: Any) -> None:
        view, source = self._view(), np.array(values)
        driver.put(current().ptr, lambda: view.__setitem__(key, source))

    @property
    def T(self) -> ndarray:
        return ndarray(self.shape[::-1], self.dtype, self.data, self.strides[::-1])

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __add__(self, other: Any) -> ndarray:
        return self._made_of(np.add, other)

    def __mul__(self, other: Any) -> ndarray:
        return self._made_of(np.multiply, other)

    def __iadd__(self, other: Any) -> ndarray:
        view, source = self._view(), other._view() if isinstance(other, ndarray) else other
        driver.put(current().ptr, lambda: np.add(view, source, out=view))
        return self

    def _made_of(self, function: np.ufunc, other: Any) -> ndarray:
        made, source = empty(self.shape, self.dtype), other._view() if isinstance(other, ndarray) else other
        mine, view = self._view(), made._view()
        driver.put(current().ptr, lambda: function(mine, source, out=view))
        return made

    def copy(self) -> ndarray:
        """Row-major, in the order of the current stream."""
        made = empty(self.shape, self.dtype)
        source, view = self._view(), made._view()
        driver.put(current().ptr, lambda: view.__setitem__(..., source))
        return made

    def fill(self, value: float) -> None:
        """In the order of the current stream."""
        view = self._view()
        driver.put(current().ptr, lambda: view.fill(value))

    def scale(self, factor: float) -> None:
        """In place, in the order of the current stream."""
        view = self._view()
        driver.put(current().ptr, lambda: np.multiply(view, factor, out=view))

    def get(self) -> np.ndarray:
        """Waits for the current stream."""
        view, copies = self._view(), []
        driver.put(current().ptr, lambda: copies.append(view.copy()))
        driver.synchronize_stream(current().ptr)
        copy: np.ndarray = copies[0]
        return copy


class _Block:
    """An allocation; goes back to its stream's free list."""

    def __init__(self, nbytes: int) -> None:
        key = (nbytes, current().ptr)
        free = _free.setdefault(key, [])
        self.address = free.pop() if free else driver.allocate(nbytes)
        weakref.finalize(self, free.append, self.address).atexit = False


def current(device: int = 0) -> _Stream:
    return _Stream(_streams.used[-1])


@contextlib.contextmanager
def stream() -> Iterator[int]:
    """Work inside goes to a stream of its own."""
    _streams.used.append(driver.create_stream())
    try:
        yield _streams.used[-1]
    finally:
        _streams.used.pop()


def empty(shape: Any, dtype: Any = np.float32) -> ndarray:
    dtype, extents = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
    block = _Block(max(int(np.prod(extents)) * dtype.itemsize, 1))
    strides = [step * dtype.itemsize for step in contiguous_strides(extents)]
    return ndarray(extents, dtype, _Pointer(block.address, block), strides)


def asarray(values: Any) -> ndarray:
    """A copy on the GPU, in the order of the current stream."""
    source = np.ascontiguousarray(values)
    made = empty(source.shape, source.dtype)
    view = made._view()
    driver.put(current().ptr, lambda: view.__setitem__(..., source))
    return made


def ascontiguousarray(array: ndarray) -> ndarray:
    steps = tuple(step * array.dtype.itemsize for step in contiguous_strides(array.shape))
    return array if steps == array.strides else array.copy()


class ExternalStream:
    """A stream of somebody else's, which a block works on."""

    def __init__(self, ptr: int, device: int = -1) -> None:
        self.ptr = ptr

    def __enter__(self) -> None:
        _streams.used.append(self.ptr)

    def __exit__(self, *_: object) -> None:
        _streams.used.pop()


class UnownedMemory(NamedTuple):
    """Memory of somebody else's."""

    ptr: int
    size: int
    owner: object
    device_id: int


def _pointer(memory: UnownedMemory, offset: int) -> _Pointer:
    return _Pointer(memory.ptr + offset, memory)


class _Context:
    def __init__(self, device: int) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def reset() -> None:
    """Forget memory that was freed: the GPU has none of it any more."""
    _free.clear()


def install() -> None:
    """Let the client find it."""
    soft_gpu.install()
    module = types.ModuleType("cupy")
    vars(module).update(ndarray=ndarray, empty=empty, ascontiguousarray=ascontiguousarray, dtype=np.dtype)
    vars(module)["cuda"] = types.SimpleNamespace(
        get_current_stream=current,
        Device=_Context,
        ExternalStream=ExternalStream,
        UnownedMemory=UnownedMemory,
        MemoryPointer=_pointer,
        is_available=lambda: True,
    )
    ndarray.__module__ = "cupy"
    sys.modules["cupy"] = module
