"""Machine code and launches, as the driver has them: a part of Driver (ipc/cuda/driver.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_ubyte, c_uint, c_void_p

from layerzero.ipc.cuda.library import Library

MAX_DYNAMIC_SHARED_BYTES, NON_PORTABLE_CLUSTER_SIZE = 8, 14  # CUfunction_attribute


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", c_int), ("_padding", c_int), ("value", c_ubyte * 64)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("attribute_count", c_uint),
    ]


class Kernels(Library):
    """Every method may raise CudaError, and needs a current context."""

    def load_module(self, code: bytes) -> int:
        """Load machine code (a cubin or a fatbin) into the current context. It stays until `unload_module`."""
        return self._handle("cuModuleLoadData", code)

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        return self._handle("cuModuleGetFunction", module, name.encode())

    def set_function_attribute(self, function: int, which: int, value: int) -> None:
        self._call("cuFuncSetAttribute", function, which, value)

    def launch_kernel(self, config: LaunchConfig, function: int, params: ctypes.Array[c_void_p]) -> None:
        """`params`: the address of each parameter; they are read before this returns."""
        self._call("cuLaunchKernelEx", byref(config), function, params, None)

    def fill(self, address: int, value: int, itemsize: int, count: int, stream: int) -> None:
        """Set `count` elements of 1, 2 or 4 bytes."""
        self._call(
            {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[itemsize],
            address,
            value,
            count,
            stream,
        )


def config_of(
    grid: Sequence[int], block: Sequence[int], shared_bytes: int, attributes: Sequence[tuple[int, bytes]]
) -> LaunchConfig:
    """A launch but for its stream."""
    table = (LaunchAttribute * max(len(attributes), 1))()
    for entry, (which, value) in zip(table, attributes, strict=False):
        entry.id = which
        entry.value[:] = value
    return LaunchConfig(*grid, *block, shared_bytes, None, table, len(attributes))
