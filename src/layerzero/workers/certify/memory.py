"""Memory to try kernels in, outside a worker: host memory or a GPU's, whichever they compute in."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any, Protocol

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.shm import memory
from layerzero.ipc.vocabulary.numerics import scatter
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.certify.cases import Case
from layerzero.workers.provider import Block, Bound, DeviceMemory, Loaded

ARENA_BYTES = 4 << 20  # more than any case of the probe takes
# Outputs hold this before a run: what a kernel leaves out does not look right, and neither does what it adds to. It is
# near the largest number of every dtype of floats (1.3e36 in float32); 0xA5, say, is -2.9e-16, and a sum hides it.
FILL = 0x7B
_MILD = 0xA5  # a small number in every dtype of floats
_GPU_ALIGNMENT = 256  # bytes; what cuMemAlloc gives


class Bench(Protocol):
    """Places blocks one after the other, and runs a kernel that is bound to them."""

    def clear(self) -> None:
        """Forget all blocks."""

    def input(self, spec: TensorSpec, data: bytes) -> Block:
        """A block that holds these elements (row-major), and zeros between them."""

    def filled(self, spec: TensorSpec) -> Block:
        """A block for an input whose numbers do not matter: small ones, in every dtype of floats."""

    def output(self, spec: TensorSpec) -> Block:
        """A block full of FILL."""

    def in_place(self, spec: TensorSpec, data: bytes) -> tuple[Block, Block]:
        """A place that holds these elements, and FILL between them: as an input and as an output."""

    def content(self, block: Block) -> memoryview:
        """The bytes that a block spans, as they are now."""

    def run(self, bound: Bound) -> Any:
        """Run a kernel to its end. Raises ValueError when it wrote to an input."""


def bench_for(loaded: Loaded, nbytes: int = ARENA_BYTES, gpu: str = "") -> Bench:
    """With room for `nbytes`; on the GPU with this UUID, or the first. Raises OSError or CudaError where the kernels
    want a GPU and there is none, or not that one."""
    is_for_cpu = loaded.on_stream is None or loaded.per_client is not None  # functions run where their arrays are
    return HostBench(nbytes) if is_for_cpu else GpuBench(loaded, nbytes, gpu)


def room_for(specs: Iterable[TensorSpec | None]) -> int:
    """Bytes that blocks for all of these take."""
    return sum(spec.span_bytes + _GPU_ALIGNMENT for spec in specs if spec is not None)


class _Placed:
    """Where the next block goes in an arena."""

    def __init__(self, alignment: int, nbytes: int) -> None:
        self._alignment = alignment
        self._nbytes = nbytes
        self._end = 0

    def clear(self) -> None:
        self._end = 0

    def place(self, spec: TensorSpec) -> slice:
        start = -(-self._end // self._alignment) * self._alignment
        self._end = start + spec.span_bytes
        if self._end > self._nbytes:
            raise ValueError(f"the blocks need more than {self._nbytes} bytes")
        return slice(start, self._end)


class HostBench(_Placed):
    """One memfd, seen through a read-only map by inputs, so that a kernel which writes to them dies, and through a
    writable one by outputs."""

    def __init__(self, nbytes: int) -> None:
        nbytes = max(nbytes, memory.PAGE_BYTES)  # nothing cannot be mapped
        super().__init__(memory.ALIGNMENT, nbytes)
        fd = memory.create_memfd("lz-bench", nbytes)
        self._read = memoryview(memory.map_fd(fd, nbytes, writable=False))
        self._write = memoryview(memory.map_fd(fd, nbytes, writable=True))
        os.close(fd)

    def input(self, spec: TensorSpec, data: bytes) -> Block:
        place = self.place(spec)
        self._write[place] = bytes(spec.span_bytes)
        scatter(data, spec, self._write[place])
        return Block(self._read[place], spec)

    def filled(self, spec: TensorSpec) -> Block:
        place = self.place(spec)
        self._write[place] = bytes([_MILD]) * spec.span_bytes
        return Block(self._read[place], spec)

    def output(self, spec: TensorSpec) -> Block:
        place = self.place(spec)
        self._write[place] = bytes([FILL]) * spec.span_bytes
        return Block(self._write[place], spec)

    def in_place(self, spec: TensorSpec, data: bytes) -> tuple[Block, Block]:
        place = self.place(spec)
        self._write[place] = bytes([FILL]) * spec.span_bytes
        scatter(data, spec, self._write[place])
        return Block(self._read[place], spec), Block(self._write[place], spec)

    def content(self, block: Block) -> memoryview:
        return block.host

    def run(self, bound: Bound) -> Any:
        return bound()


class GpuBench(_Placed):
    """One allocation on the first GPU, used through a stream that does not wait for the default one."""

    def __init__(self, loaded: Loaded, nbytes: int = ARENA_BYTES, gpu: str = "") -> None:
        super().__init__(_GPU_ALIGNMENT, nbytes)
        assert loaded.on_stream is not None
        self._on_stream = loaded.on_stream
        self.driver = cuda.load()
        self._ordinal = ordinal = _ordinal(self.driver, gpu)
        self.driver.push_context(self.driver.retain_context(ordinal))  # for good: this process ends soon
        self.stream = self.driver.create_stream()
        self._arena = self.driver.allocate(max(nbytes, 1))
        self._inputs: list[tuple[Block, bytes]] = []

    def clear(self) -> None:
        super().clear()
        self._inputs.clear()

    def input(self, spec: TensorSpec, data: bytes) -> Block:
        content = bytearray(spec.span_bytes)
        scatter(data, spec, memoryview(content))
        block = self._block(spec, content)
        self._inputs.append((block, bytes(content)))
        return block

    def filled(self, spec: TensorSpec) -> Block:
        return self._block(spec, bytearray([_MILD]) * spec.span_bytes)

    def output(self, spec: TensorSpec) -> Block:
        return self._block(spec, bytearray([FILL]) * spec.span_bytes)

    def in_place(self, spec: TensorSpec, data: bytes) -> tuple[Block, Block]:
        content = bytearray([FILL]) * spec.span_bytes
        scatter(data, spec, memoryview(content))
        block = self._block(spec, content)
        return block, block

    def content(self, block: Block) -> memoryview:
        copy = bytearray(block.spec.span_bytes)
        if copy:
            self.driver.copy_to_host(_address(copy), block.device.pointer, len(copy), self.stream)
            self.driver.synchronize_stream(self.stream)
        return memoryview(copy)

    def run(self, bound: Bound) -> Any:
        with self._on_stream(self.stream):
            result = bound()
        self.driver.synchronize_stream(self.stream)
        for block, before in self._inputs:
            if self.content(block) != before:
                raise ValueError(f"the kernel wrote to its input {block.spec}")
        return result

    def _block(self, spec: TensorSpec, content: bytearray) -> Block:
        place = self.place(spec)
        start = self._arena + place.start
        if content:
            self.driver.copy_to_device(start, _address(content), len(content), self.stream)
            self.driver.synchronize_stream(self.stream)
        return Block(DeviceMemory(start, spec.span_bytes, self._ordinal), spec)


def placed(bench: Bench, op: str, case: Case) -> tuple[list[Block | None], list[Block]]:
    """Blocks for the inputs of a case and for its outputs."""
    bench.clear()
    inputs: list[Block | None] = []
    written: list[Block] = []
    for name, spec, data in zip(OPS[op].inputs, case.inputs, case.data, strict=True):
        if spec is None:
            inputs.append(None)
        elif name in OPS[op].in_place:
            block, target = bench.in_place(spec, data)
            inputs.append(block)
            written.append(target)
        else:
            inputs.append(bench.input(spec, data))
    return inputs, written or [bench.output(spec) for spec in case.outputs]


def _ordinal(driver: cuda.Driver, gpu: str) -> int:
    if not gpu:
        return 0
    found = [one.ordinal for one in driver.gpus() if one.uuid == gpu]
    if not found:
        raise OSError(f"this process sees no GPU {gpu}")
    return found[0]


def _address(content: bytearray) -> int:
    """Valid for as long as the bytes are neither freed nor resized."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(content))
