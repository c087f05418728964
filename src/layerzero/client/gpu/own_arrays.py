"""Arrays of our own on a GPU: for calls that nobody has data for, whatever libraries this process has imported."""

from __future__ import annotations

import ctypes

from layerzero.client.arrays import recognition
from layerzero.client.arrays.addresses import address_of_any
from layerzero.client.arrays.recognition import Array
from layerzero.client.gpu.memory import memory_of
from layerzero.ipc.errors import CudaError, OutOfMemory
from layerzero.ipc.vocabulary.numerics import gather
from layerzero.ipc.vocabulary.tensors import TensorSpec


class GpuArray:
    """Memory of ours on a GPU, contents undefined at first; work on it goes to the stream of ours that its thread has.

    Calls take it as an array, also one that they write, and return another where they return one. Raises OutOfMemory.
    """

    def __init__(self, ordinal: int, spec: TensorSpec, stream: int | None = None) -> None:
        """`ordinal`: of a GPU of this process. `spec`: dtype, extents and strides, in elements. `stream`: where it is
        used first, and must be last; None: that of this thread."""
        self.memory = memory_of(ordinal)
        self.ordinal, self.spec = ordinal, spec
        self._whole: GpuArray | None = None  # of a part
        self._offset = 0
        try:
            self.block = self.memory.pool("ipc").take(
                spec.span_bytes, self.memory.own_stream() if stream is None else stream
            )
        except CudaError as exc:
            if not exc.is_out_of_memory:
                raise
            raise OutOfMemory(
                f"free memory on cuda:{ordinal}, for instance by torch.cuda.empty_cache(): there is none for "
                f"{spec.span_bytes:,} bytes of {spec}"
            ) from exc

    def part(self, spec: TensorSpec, offset: int) -> GpuArray:
        """An array in this one's memory, which begins so many bytes behind this one."""
        made: GpuArray = object.__new__(GpuArray)
        made.memory, made.ordinal, made.spec = self.memory, self.ordinal, spec
        made._whole, made._offset = self, offset
        return made

    def __del__(self) -> None:
        block = self.__dict__.get("block")
        if block is not None:
            self.memory.pool("ipc").give(block)

    def __repr__(self) -> str:
        return f"<{self.spec} of LayerZero's on cuda:{self.ordinal}>"

    @property
    def address(self) -> int:
        return self.block.address if self._whole is None else self._whole.address + self._offset

    def store(self, data: memoryview) -> None:
        """Bytes of the host, as many as the spec spans, to the GPU. Returns when they have been read."""
        if data.nbytes:
            stream = self.memory.own_stream()
            with self.memory.context as context:
                context.driver.copy_to_device(self.address, address_of_any(data), data.nbytes, stream)
                context.driver.synchronize_stream(stream)

    def clear(self) -> None:
        """Zeros, in the stream's order."""
        with self.memory.context as context:
            context.driver.clear(self.address, self.spec.span_bytes, self.memory.own_stream())

    def load(self) -> bytes:
        """All bytes that the spec spans. Waits for what this thread's calls do with it."""
        nbytes = self.spec.span_bytes
        data = bytearray(nbytes)
        if nbytes:
            stream = self.memory.own_stream()
            target = (ctypes.c_char * nbytes).from_buffer(data)
            with self.memory.context as context:
                context.driver.copy_to_host(ctypes.addressof(target), self.address, nbytes, stream)
                context.driver.synchronize_stream(stream)
        return bytes(data)

    def dense(self) -> GpuArray:
        """A copy in row-major order, made by the CPU."""
        made = GpuArray(self.ordinal, TensorSpec.contiguous(self.spec.dtype, self.spec.shape))
        made.store(memoryview(gather(memoryview(self.load()), self.spec)))
        return made


def _describe(array: GpuArray) -> Array:
    return Array("own", array.spec, array.address, array, array, device=array.ordinal)


recognition.teach(GpuArray, _describe)
