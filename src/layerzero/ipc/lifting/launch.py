"""Launching a lifted call by the driver alone, in Python. client/gpu/_lifted.c does the same for calls that repeat."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.cuda.kernels import (
    MAX_DYNAMIC_SHARED_BYTES,
    NON_PORTABLE_CLUSTER_SIZE,
    LaunchConfig,
    config_of,
)
from layerzero.ipc.lifting.form import Address, Copy, Fill, Kernel, Lifted

_ADDRESS = struct.Struct("<Q")
_ALIGNMENT = 64  # of a block of parameters: tensor maps lie at multiples of that


class _Ready(NamedTuple):
    """A kernel whose function is loaded."""

    step: Kernel
    function: int
    config: LaunchConfig


class LoadedCall:
    """A lifted call whose machine code is in the current context. Threads may share it."""

    def __init__(self, driver: Driver, lifted: Lifted, modules: Mapping[str, int]) -> None:
        """`modules`: handles of loaded machine code, by digest. Raises CudaError."""
        self.lifted = lifted
        self._driver = driver
        self.steps: list[_Ready | Fill | Copy] = []
        for step in lifted.steps:
            if isinstance(step, Kernel):
                function = driver.function(modules[step.code], step.name)
                if step.max_shared_bytes:
                    driver.set_function_attribute(function, MAX_DYNAMIC_SHARED_BYTES, step.max_shared_bytes)
                if step.is_cluster_size_free:
                    driver.set_function_attribute(function, NON_PORTABLE_CLUSTER_SIZE, 1)
                config = config_of(step.grid, step.block, step.shared_bytes, step.attributes)
                self.steps.append(_Ready(step, function, config))
            else:
                self.steps.append(step)

    def launch(
        self, inputs: Sequence[int], outputs: Sequence[int], scratch: Sequence[int], stream: int, *, padding: int = 0
    ) -> None:
        """Enqueue all steps. Addresses are those of the first elements, 0 for an input that is left out. `padding`: the
        value of bytes of parameters that nobody wrote. Raises CudaError."""
        memory = {"input": inputs, "output": outputs, "scratch": scratch}

        def at(address: Address) -> int:
            return memory[address.kind][address.number] + address.offset

        for step in self.steps:
            if isinstance(step, Fill):
                self._driver.fill(at(step.target), step.value, step.itemsize, step.count, stream)
            elif isinstance(step, Copy):
                self._driver.copy_on_device(at(step.target), at(step.source), step.nbytes, stream)
            else:
                kernel, function, config = step
                params = bytearray(kernel.params)
                for span in kernel.padding:
                    params[span.offset : span.offset + span.nbytes] = bytes([padding]) * span.nbytes
                for patch in kernel.patches:
                    _ADDRESS.pack_into(params, patch.at, at(patch.address))
                room = ctypes.create_string_buffer(len(params) + _ALIGNMENT)
                start = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
                ctypes.memmove(start, bytes(params), len(params))
                table = (ctypes.c_void_p * max(len(kernel.layout), 1))(*(start + span.offset for span in kernel.layout))
                config = LaunchConfig.from_buffer_copy(config)  # another thread may be at it, on another stream
                config.stream = stream
                self._driver.launch_kernel(config, function, table)
