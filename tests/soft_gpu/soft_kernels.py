"""Machine code for the GPU of soft_gpu.py: kernels in Python, which whoever loads their module launches by the driver.

Code is b"soft:" and names of KERNELS. A kernel gets its parameters by value, as its signature says: Q for an address, q
for a number, d for a float. `install()` lets a driver load and launch them, by its methods and by functions with the
driver's signatures.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tests.soft_gpu import soft_gpu
from tests.soft_gpu.soft_gpu import SoftDriver, error

from layerzero.ipc.cuda.kernels import LaunchConfig
from layerzero.ipc.errors import CudaError

NOT_FOUND, NO_BINARY, OUT_OF_RESOURCES = 500, 209, 701


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


KERNELS: dict[str, SoftKernel] = {
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
        self._handles = itertools.count(7000)

    def load_module(self, code: bytes) -> int:
        if not code.startswith(b"soft:"):
            raise error("cuModuleLoadData", NO_BINARY)
        self.loads += 1
        handle = next(self._handles)
        self.modules[handle] = tuple(code[5:].decode().split(","))
        return handle

    def unload_module(self, module: int) -> None:
        del self.modules[module]

    def function(self, module: int, name: str) -> int:
        if name not in self.modules[module] or name not in KERNELS:
            raise error("cuModuleGetFunction", NOT_FOUND)
        handle = next(self._handles)
        self.functions[handle] = name
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
        values = [
            struct.unpack(f"={kind}", ctypes.string_at(params[n], 8))[0] for n, kind in enumerate(kernel.signature)
        ]
        self.launches += 1
        grid = (config.grid_x, config.grid_y, config.grid_z)
        self.driver.put(config.stream or 0, lambda: kernel.run(grid, *values))

    def fill(self, address: int, value: int, itemsize: int, count: int, stream: int) -> None:
        data = value.to_bytes(itemsize, "little") * count
        self.driver.put(stream, lambda: ctypes.memmove(address, data, len(data)))

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
    for name in (
        *("load_module", "unload_module", "function", "set_function_attribute", "launch_kernel", "fill", "error_of"),
    ):
        setattr(driver, name, getattr(kernels, name))
    driver.teach(kernels.entries())
    return kernels
