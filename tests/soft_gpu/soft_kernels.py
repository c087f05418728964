"""Machine code for the GPU of soft_gpu.py: kernels in Python, which whoever loads their module launches by the driver.

Code is b"soft:" and names of KERNELS, up to a zero. A kernel gets its parameters by value, as its signature says: Q for
an address, q for a number, d for a float, T for a tensor of any strides (tensor_words). `install()` lets a driver load
and launch them, by its methods and by functions with the driver's signatures.

Those whose names have a `<` are the kernels of the provider in soft_lifted.py. Variants have what they do wrong behind
a `/`: soft_faults.py.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tests.soft_gpu import soft_faults, soft_gpu
from tests.soft_gpu.soft_gpu import SoftDriver, error

from layerzero.ipc.cuda.kernels import LaunchConfig
from layerzero.ipc.cuda.nodes import FillNode, KernelNode
from layerzero.ipc.errors import CudaError
from layerzero.ipc.vocabulary.tensors import TensorSpec

NOT_FOUND, NO_BINARY, OUT_OF_RESOURCES = 500, 209, 701
STRIKING = 0.4375  # the GPU is lost to a process where silu gets an array that begins with it; no probe has such
_TENSOR = struct.Struct("=QBB")  # address, dtype, dimensions; six bytes later extents and strides of MAX_NDIM
_NUMBER = struct.Struct("=q")
MAX_NDIM = 6
_EXTENTS_AT, _STRIDES_AT = 16, 16 + 8 * MAX_NDIM
_BYTES = {"Q": 8, "q": 8, "d": 8, "T": 16 + 16 * MAX_NDIM}
_DTYPES = ("float32", "int64")
_NONE = 255  # as a dtype: no tensor


class Strike(Exception):
    """A kernel has read or written where it must not."""


def tensor_words(address: int, spec: TensorSpec | None) -> bytes:
    """A tensor as a parameter. What a compiler would not write has what lay there before: anything."""
    words = bytearray(os.urandom(_BYTES["T"]))
    if spec is None:
        _TENSOR.pack_into(words, 0, 0, _NONE, 0)
        return bytes(words)
    _TENSOR.pack_into(words, 0, address, _DTYPES.index(spec.dtype), spec.ndim)
    for at, numbers in ((_EXTENTS_AT, spec.shape), (_STRIDES_AT, spec.strides)):
        for n, number in enumerate(numbers):
            _NUMBER.pack_into(words, at + 8 * n, number)
    return bytes(words)


def _tensor(words: bytes) -> Any:
    address, dtype, ndim = _TENSOR.unpack_from(words)
    if dtype == _NONE:
        return None
    shape, strides = (
        tuple(_NUMBER.unpack_from(words, at + 8 * n)[0] for n in range(ndim)) for at in (_EXTENTS_AT, _STRIDES_AT)
    )
    return soft_gpu.array_at(address, TensorSpec(_DTYPES[dtype], shape, strides))


class SoftKernel(NamedTuple):
    """`run` gets the grid, and each parameter."""

    signature: str
    run: Callable[..., None]


def floats(address: int, count: int) -> Any:
    """Of the GPU's memory."""
    return np.ndarray((count,), np.float32, buffer=(ctypes.c_char * (4 * count)).from_address(address))


def _silu(grid: tuple[int, ...], out: int, x: int, count: int) -> None:
    wide = floats(x, count).astype(np.float64)
    with np.errstate(over="ignore"):
        floats(out, count)[...] = wide / (1 + np.exp(-wide))


def _scale(grid: tuple[int, ...], out: int, x: int, factor: float, count: int) -> None:
    floats(out, count)[...] = floats(x, count) * np.float32(factor)


def _add(grid: tuple[int, ...], out: int, one: int, other: int, count: int) -> None:
    time.sleep(0)  # another thread's steps have their chance to come between
    floats(out, count)[...] = floats(one, count) + floats(other, count)


def _append(
    grid: tuple[int, ...], rows: int, cache: int, slots: int, count: int, row: int, room: int, _padding: int
) -> None:
    """Rows of a cache."""
    source, target = floats(rows, count * row), floats(cache, room * row)
    where = np.ndarray((count,), np.int64, buffer=(ctypes.c_char * (8 * count)).from_address(slots))
    for n, slot in enumerate(where.tolist()):
        if 0 <= slot < room:
            target[slot * row : (slot + 1) * row] = source[n * row : (n + 1) * row]


def silu_of(grid: tuple[int, ...], out: Any, x: Any) -> None:
    if x.size and x.flat[0] == STRIKING:
        raise Strike
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        out[...] = wide / (1 + np.exp(-wide))


def _matmul_of(grid: tuple[int, ...], out: Any, a: Any, b: Any) -> None:
    out[...] = a.astype(np.float64) @ b.astype(np.float64)


def _gelu_of(grid: tuple[int, ...], out: Any, x: Any, is_tanh: int) -> None:
    assert not out.any(), "what it adds to is not zero"
    wide = x.astype(np.float64)
    if is_tanh:
        out += 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    else:
        out += 0.5 * wide * (1 + np.vectorize(math.erf, otypes=[float])(wide / math.sqrt(2)))


def _store_of(grid: tuple[int, ...], out: Any, x: Any) -> None:
    out[...] = x


def _layer_norm_of(grid: tuple[int, ...], out: Any, x: Any, weight: Any, bias: Any, ndim: int, eps: float) -> None:
    axes, wide = tuple(range(-ndim, 0)), x.astype(np.float64)
    mean = wide.mean(axes, keepdims=True)
    result = (wide - mean) / np.sqrt(((wide - mean) ** 2).mean(axes, keepdims=True) + eps)
    out[...] = result * (1 if weight is None else weight) + (0 if bias is None else bias)


def _take_of(grid: tuple[int, ...], out: Any, table: Any, index: Any) -> None:
    if index.min() < 0 or index.max() >= len(table):
        raise Strike
    out[...] = table[index]


def _append_of(grid: tuple[int, ...], keys: Any, values: Any, k_cache: Any, v_cache: Any, slots: Any) -> None:
    for rows, cache in ((keys, k_cache), (values, v_cache)):
        for row, slot in zip(rows, slots.tolist(), strict=True):
            if 0 <= slot < cache.shape[0] * cache.shape[1]:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = row


KERNELS: dict[str, SoftKernel] = {
    "silu<float>": SoftKernel("TT", silu_of),
    "matmul<float>": SoftKernel("TTT", _matmul_of),
    "gelu<float>": SoftKernel("TTq", _gelu_of),
    "store<float>": SoftKernel("TT", _store_of),
    "layer_norm<float>": SoftKernel("TTTTqd", _layer_norm_of),
    "append<float>": SoftKernel("TTTTT", _append_of),
    "take<float>": SoftKernel("TTT", _take_of),
    "silu": SoftKernel("QQq", _silu),
    "scale": SoftKernel("QQdq", _scale),
    "add": SoftKernel("QQQq", _add),
    "append": SoftKernel("QQQqqqq", _append),
    "strike": SoftKernel("QQq", lambda *_: None),  # the GPU is lost
    "refuse": SoftKernel("QQq", lambda *_: None),  # it is not launched
}


class _Kernels:
    """What a SoftDriver has loaded."""

    def __init__(self, driver: SoftDriver) -> None:
        self.driver = driver
        self.loads, self.launches = 0, 0
        self.modules: dict[int, tuple[str, ...]] = {}
        self.functions: dict[int, str] = {}
        self.on_load: Callable[[int, bytes], None] = lambda handle, code: None
        self._module_of: dict[int, int] = {}  # by function
        self._handles = itertools.count(7000)

    def load_module(self, code: bytes) -> int:
        if not code.startswith(b"soft:"):
            raise error("cuModuleLoadData", NO_BINARY)
        self.loads += 1
        handle = next(self._handles)
        self.modules[handle] = tuple(code[5:].partition(b"\0")[0].decode().split(","))
        self.on_load(handle, code)
        return handle

    def unload_module(self, module: int) -> None:
        del self.modules[module]

    def function(self, module: int, name: str) -> int:
        if name not in self.modules[module] or name not in KERNELS:
            raise error("cuModuleGetFunction", NOT_FOUND)
        handle = next(self._handles)
        self.functions[handle], self._module_of[handle] = name, module
        return handle

    def set_function_attribute(self, function: int, which: int, value: int) -> None:
        assert function in self.functions

    def launch_kernel(self, config: LaunchConfig, function: int, params: Any) -> None:
        self.driver.check()
        name = self.functions[function]
        if name == "strike":
            self.driver.is_lost = True
            self.driver.check()
        if name == "refuse":
            raise error("cuLaunchKernelEx", OUT_OF_RESOURCES)
        kernel = KERNELS[name]
        words = [ctypes.string_at(params[n], _BYTES[kind]) for n, kind in enumerate(kernel.signature)]
        self.launches += 1
        grid = (config.grid_x, config.grid_y, config.grid_z)
        node = self._node(config, function, words)
        self.driver.put(config.stream or 0, lambda: self._run(kernel, grid, words), node)

    def _run(self, kernel: SoftKernel, grid: tuple[int, int, int], words: list[bytes]) -> None:
        try:
            kernel.run(
                grid,
                *(
                    _tensor(raw) if kind == "T" else struct.unpack(f"={kind}", raw)[0]
                    for kind, raw in zip(kernel.signature, words, strict=True)
                ),
            )
        except Exception as exc:  # the stream's thread must live
            if not isinstance(exc, Strike):
                traceback.print_exc()
            self.driver.is_lost = True

    def _node(self, config: LaunchConfig, function: int, words: list[bytes]) -> KernelNode:
        ends = list(itertools.accumulate(map(len, words), initial=0))
        return KernelNode(
            module=self._module_of[function],
            name=self.functions[function],
            grid=(config.grid_x, config.grid_y, config.grid_z),
            block=(config.block_x, config.block_y, config.block_z),
            shared_bytes=config.shared_bytes,
            params=b"".join(words),
            layout=tuple((at, len(raw)) for at, raw in zip(ends, words, strict=False)),
            attributes=tuple(
                (config.attributes[n].id, bytes(config.attributes[n].value)) for n in range(config.attribute_count)
            ),
            max_shared_bytes=0,
            is_cluster_size_free=False,
        )

    def fill(self, address: int, value: int, itemsize: int, count: int, stream: int) -> None:
        data = value.to_bytes(itemsize, "little") * count
        node = FillNode(address, value, itemsize, count)
        self.driver.put(stream, lambda: ctypes.memmove(address, data, len(data)), node)

    def error_of(self, call: str, number: int) -> CudaError:
        return error(call, number, sticky=number in (700, 719))

    def entries(self) -> dict[str, Any]:
        i, p, u, u64, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t

        def code(work: Callable[[], None]) -> int:
            try:
                work()
            except CudaError as exc:
                return exc.number
            return 0

        def launch(config: int, function: int, params: int, extra: int | None) -> int:
            table = (p * 64).from_address(params)
            return code(lambda: self.launch_kernel(LaunchConfig.from_address(config), function, table))

        def filler(kind: Any, itemsize: int) -> Any:
            return ctypes.CFUNCTYPE(i, u64, kind, size, p)(
                lambda at, value, count, stream: code(lambda: self.fill(at, value, itemsize, count, stream or 0))
            )

        return {
            "launch": ctypes.CFUNCTYPE(i, p, p, p, p)(launch),
            "fill_8": filler(ctypes.c_ubyte, 1),
            "fill_16": filler(ctypes.c_ushort, 2),
            "fill_32": filler(u, 4),
            "copy": ctypes.CFUNCTYPE(i, u64, u64, size, p)(
                lambda to, at, count, stream: code(lambda: self.driver.copy_on_device(to, at, count, stream or 0))
            ),
        }


def install(driver: SoftDriver = soft_gpu.driver) -> _Kernels:
    """Let the driver have kernels. Returns what it has loaded from now on."""
    kernels = _Kernels(driver)
    KERNELS.update(soft_faults.kernels(SoftKernel, silu_of, _append_of))
    for name in (
        *("load_module", "unload_module", "function", "set_function_attribute", "launch_kernel", "fill", "error_of"),
    ):
        setattr(driver, name, getattr(kernels, name))
    driver.teach(kernels.entries())
    return kernels
