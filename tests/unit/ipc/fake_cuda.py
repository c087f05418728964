"""A GPU made of bytes, seen by drivers as of several processes: for tests of what is decided above the driver.

Work on streams runs when it is enqueued, except on a stream that is held.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from layerzero.ipc.cuda.driver import Gpu, Pointer
from layerzero.ipc.errors import CudaError

UUID = "GPU-10101010-1010-1010-1010-101010101010"
_addresses = itertools.count(0x7F0000000000, 1 << 30)
_ids = itertools.count(1)
ALL = -2  # in place of a stream


class FakeGpu:
    """Physical memory, by id, and what handles and descriptors of it lead to."""

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}
        self.by_handle: dict[bytes, int] = {}
        self.by_inode: dict[int, int] = {}

    def make(self, nbytes: int) -> int:
        number = next(_ids)
        self.memory[number] = bytearray(nbytes)
        return number


def error(call: str, number: int, *, sticky: bool = False) -> CudaError:
    return CudaError(f"{call} returned {number}", call=call, number=number, name="", sticky=sticky)


class FakeDriver:
    """One process's driver. `fails[method]` makes a method raise that error, as often as `times[method]` says."""

    def __init__(self, gpu: FakeGpu, uuid: str = UUID) -> None:
        self.gpu, self.uuid = gpu, uuid
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> memory id, bytes
        self.fails: dict[str, CudaError] = {}
        self.times: Counter[str] = Counter()
        self.legacy, self.pooled, self.managed, self.ordinal = True, False, False, 0
        self.held: set[int] = set()  # streams that get no further
        self.events: dict[int, int] = {}  # event -> stream
        self.calls: Counter[str] = Counter()
        self.waits: list[tuple[int, int, int]] = []
        self.pinned: dict[int, int] = {}
        self.depth = 0
        self.captures: dict[int, list[Callable[[], None]]] = {}  # stream -> what it was told since
        self.broken: set[int] = set()  # streams whose capture is
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.graph_bytes, self.free_bytes = 1 << 20, 1 << 30

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if callable(value) and not name.startswith("_"):
            self.calls[name] += 1
            failure = self.fails.get(name)
            if failure is not None and self.times[name] != 0:
                self.times[name] -= 1

                def fail(*_: object, **__: object) -> None:
                    raise failure

                return fail
        return value

    def gpus(self) -> tuple[Gpu, ...]:
        return (Gpu(0, self.uuid),)

    def retain_context(self, ordinal: int) -> int:
        return 77

    def push_context(self, context: int) -> None:
        self.depth += 1

    def pop_context(self) -> int:
        self.depth -= 1
        return 77

    def synchronize(self) -> None:
        assert not self.held

    def _map(self, number: int) -> int:
        assert self.depth > 0, "no current context"
        address = next(_addresses)
        self.mapped[address] = (number, len(self.gpu.memory[number]))
        return address

    def _bytes(self, address: int, nbytes: int) -> tuple[bytearray, int]:
        for base, (number, size) in self.mapped.items():
            if base <= address and address + nbytes <= base + size:
                return self.gpu.memory[number], address - base
        raise error("copy", 700, sticky=True)

    def allocate(self, nbytes: int) -> int:
        return self._map(self.gpu.make(nbytes))

    def free(self, address: int) -> None:
        del self.mapped[address]

    def address_range(self, address: int) -> tuple[int, int]:
        base = max(base for base in self.mapped if base <= address)
        return base, self.mapped[base][1]

    def buffer_id(self, address: int) -> int:
        return self.mapped[self.address_range(address)[0]][0]

    def pointer(self, address: int) -> Pointer | None:
        known = [base for base, (_, size) in self.mapped.items() if base <= address < base + size]
        if not known:
            return None
        return Pointer(self.ordinal, self.mapped[known[0]][0], self.legacy, self.managed, self.pooled)

    def ipc_export(self, base: int) -> bytes:
        handle = os.urandom(64)
        self.gpu.by_handle[handle] = self.mapped[base][0]
        return handle

    def ipc_open(self, handle: bytes) -> int:
        return self._map(self.gpu.by_handle[handle])

    def ipc_close(self, address: int) -> None:
        del self.mapped[address]

    def vmm_granularity(self, ordinal: int) -> int:
        return 2 << 20

    def vmm_create(self, nbytes: int, ordinal: int) -> int:
        return self.gpu.make(nbytes)

    def vmm_export(self, handle: int) -> int:
        fd = os.memfd_create("fake-gpu-memory")
        self.gpu.by_inode[os.fstat(fd).st_ino] = handle
        return fd

    def vmm_import(self, fd: int) -> int:
        return self.gpu.by_inode[os.fstat(fd).st_ino]

    def vmm_release(self, handle: int) -> None:
        pass

    def vmm_map(self, handle: int, nbytes: int, ordinal: int) -> int:
        if nbytes > len(self.gpu.memory[handle]):
            raise error("cuMemMap", 1)
        return self._map(handle)

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        del self.mapped[address]

    def host_register(self, address: int, nbytes: int, owner: object) -> int:
        self.pinned[address] = nbytes
        return address

    def host_unregister(self, address: int) -> None:
        del self.pinned[address]

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        memory, offset = self._bytes(target, nbytes)
        memory[offset : offset + nbytes] = ctypes.string_at(source, nbytes)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        memory, offset = self._bytes(source, nbytes)
        ctypes.memmove(target, bytes(memory[offset : offset + nbytes]), nbytes)

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        memory, offset = self._bytes(address, nbytes)
        memory[offset : offset + nbytes] = bytes(nbytes)

    def create_stream(self) -> int:
        return next(_ids)

    def synchronize_stream(self, stream: int) -> None:
        if stream in self.captures:
            self.broken.add(stream)
            raise error("cuStreamSynchronize", 900)
        assert stream not in self.held

    def destroy_stream(self, stream: int) -> None:
        pass

    def create_event(self, *, is_timed: bool = False) -> int:
        event = next(_ids)
        self.events[event] = 0
        return event

    def elapsed_ns(self, start: int, end: int) -> int:
        assert {start, end} <= {*self.events}
        return 1234

    def record_event(self, event: int, stream: int) -> None:
        self.events[event] = stream

    def is_stream_idle(self, stream: int) -> bool:
        return stream not in self.held

    def record_context(self, context: int, event: int) -> None:
        assert not self.captures, "this breaks them"
        self.events[event] = ALL

    def is_event_done(self, event: int) -> bool:
        return not self.held if self.events[event] == ALL else self.events[event] not in self.held

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if stream in self.captures:
            self.captures[stream].append(lambda: self.copy_on_device(target, source, nbytes, -1))
            return
        memory, offset = self._bytes(source, nbytes)
        data = bytes(memory[offset : offset + nbytes])
        memory, offset = self._bytes(target, nbytes)
        memory[offset : offset + nbytes] = data

    def synchronize_event(self, event: int) -> None:
        assert self.events[event] not in self.held

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def write_value(self, stream: int, address: int, value: int) -> None:
        assert any(base <= address < base + nbytes for base, nbytes in self.pinned.items())
        ctypes.c_uint32.from_address(address).value = value

    def wait_value(self, stream: int, address: int, value: int, *, equal: bool = False) -> None:
        self.waits.append((stream, ctypes.c_uint32.from_address(address).value, value))

    def write_and_wait(self, stream: int, address: int, value: int, waits_at: int, until: int) -> None:
        self.write_value(stream, address, value)
        self.wait_value(stream, waits_at, until)

    def ring_and_wait(self, stream: int, graph_slot: int, done: int) -> None:
        self.write_value(stream, done, 0)
        self.write_value(stream, graph_slot, 1)
        self.wait_value(stream, done, 1, equal=True)

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes - self.graph_bytes * len(self.graphs), 1 << 40

    def begin_capture(self, stream: int) -> None:
        self.captures[stream] = []

    def end_capture(self, stream: int) -> int:
        captured = self.captures.pop(stream)
        if stream in self.broken:
            self.broken.remove(stream)
            raise error("cuStreamEndCapture", 901)
        if not captured:
            return 0
        graph = next(_ids)
        self.graphs[graph] = captured
        return graph

    def launch_graph(self, graph: int, stream: int) -> None:
        for work in self.graphs[graph]:
            work()

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]
