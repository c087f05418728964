"""A GPU of threads and shared memory, so that calls on GPUs can be tested end to end where there is none.

What the driver promises about order holds: work of a stream runs later, in its order, on a thread of its own; memory
that is exported is the same memory elsewhere. Times are those of the threads; limits mean nothing here.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.soft_gpu.soft_streams import Capture, Stream

from layerzero.ipc.cuda import abi
from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.driver import Gpu, Pointer
from layerzero.ipc.cuda.nodes import Allocation, CopyNode, FillNode, Node, OtherNode
from layerzero.ipc.errors import CudaError

UUID = "GPU-50f70000-0000-0000-0000-000000000000"
_HANDLE = struct.Struct("<IIQ")  # pid, descriptor, bytes
_ILLEGAL_ADDRESS, _INVALID_CONTEXT, _ILLEGAL_STATE = 700, 201, 401
_CAPTURE_UNSUPPORTED, _CAPTURE_INVALIDATED = 900, 901


def error(call: str, number: int, *, sticky: bool = False) -> CudaError:
    return CudaError(f"{call} returned {number}", call=call, number=number, name="", sticky=sticky)


_HOST_FUNCTION = OtherNode("a function on the host")
_HOST_COPY = OtherNode("a copy to or from other memory than the GPU's")


class _Memory:
    """Mapped bytes at an address that stays."""

    def __init__(self, fd: int, nbytes: int, number: int) -> None:
        self.fd, self.nbytes, self.number = fd, nbytes, number
        self.map = mmap.mmap(fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class SoftDriver:
    """What layerzero.ipc.cuda.driver.Driver has, as far as calls use it."""

    def __init__(self) -> None:
        self.is_lost = False
        self.has_context_events = False
        self._memory: dict[int, _Memory] = {}
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {0: Stream(self)}
        self._handles = itertools.count(1000)
        self._captures: dict[int, Capture] = {}  # by stream
        self._graphs: dict[int, Capture] = {}
        self._thread = threading.local()
        self._events: dict[int, tuple[Stream, int]] = {}
        self._times: dict[int, int] = {}  # when streams came to events, in ns
        self._pinned: dict[int, int] = {}
        self._owners: dict[int, object] = {}
        self._physical: dict[int, tuple[int, int]] = {}
        self._touched: dict[int, int] = {}  # words that streams will read or write
        self._lock = threading.Lock()
        self._entries = self._make_entries()

    def check(self) -> None:
        if self.is_lost:
            raise error("cuStreamSynchronize", _ILLEGAL_ADDRESS, sticky=True)

    def reset(self) -> None:
        """Let go of all memory and streams; nobody uses them any more."""
        with self._lock:
            for memory in self._memory.values():
                os.close(memory.fd)
            self._memory.clear()
        for stream in self._streams.values():
            stream.end()
        self._streams = {0: Stream(self)}

    # Devices

    def entries(self, names: Mapping[str, str] = abi.ENTRIES) -> dict[str, int]:
        """Functions with the driver's signatures, for C of the client; none where one is missing."""
        if not set(names) <= set(self._entries):
            return {}
        return {name: ctypes.cast(self._entries[name], ctypes.c_void_p).value or 0 for name in names}

    def teach(self, entries: dict[str, Any]) -> None:
        """More of them (soft_kernels.py)."""
        self._entries.update(entries)

    def _make_entries(self) -> dict[str, Any]:
        p, i, u, u64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64

        def store(kind: Any, at: int, value: int) -> None:
            kind.from_address(at).value = value

        def code(work: Callable[[], None]) -> int:
            try:
                work()
            except CudaError as exc:
                return exc.number
            return 0

        def batch(stream: int, count: int, ops: int, flags: int) -> int:
            words = [
                abi.WORD_OP.unpack_from(ctypes.string_at(ops, count * abi.WORD_OP.size), n * abi.WORD_OP.size)
                for n in range(count)
            ]
            (write, at, value, *_), (wait, waits_at, until, flag, _) = words
            assert (write, wait, flag, flags) == (abi.WRITE_32, abi.WAIT_32, abi.GEQ, 0)
            return code(lambda: self.write_and_wait(stream or 0, at, value, waits_at, until))

        def attribute(found: int, which: int, address: int) -> int:
            assert which == abi.BUFFER_ID
            return code(lambda: store(u64, found, self.buffer_id(address)))

        return {
            "get_current": ctypes.CFUNCTYPE(i, p)(lambda at: code(lambda: store(u64, at, self.current_context()))),
            "is_capturing": ctypes.CFUNCTYPE(i, p, p)(
                lambda stream, at: code(lambda: store(i, at, self.is_capturing(stream or 0)))
            ),
            "get_attribute": ctypes.CFUNCTYPE(i, p, i, u64)(attribute),
            "batch": ctypes.CFUNCTYPE(i, p, u, p, u)(batch),
        }

    def gpus(self) -> tuple[Gpu, ...]:
        return (Gpu(0, UUID),)

    def name(self, ordinal: int) -> str:
        return "GPU of threads"

    def version(self) -> int:
        return 13000

    def has_mps(self, ordinal: int) -> bool:
        return "LZ_SOFT_MPS" in os.environ

    def retain_context(self, ordinal: int) -> int:
        return 1

    def push_context(self, context: int) -> None:
        pass

    def pop_context(self) -> int:
        return 1

    def current_context(self) -> int:
        return 1

    # Memory

    def _map(self, fd: int, nbytes: int) -> int:
        made = _Memory(fd, nbytes, next(self._ids))
        with self._lock:
            self._memory[made.address] = made
        return made.address

    def allocate(self, nbytes: int) -> int:
        fd = os.memfd_create("soft-gpu")
        os.ftruncate(fd, nbytes)
        return self._map(fd, nbytes)

    def free(self, address: int) -> None:
        with self._lock:
            if not self.is_lost:  # else it stays: the kernel that struck may still run
                os.close(self._memory.pop(address).fd)

    def _found(self, address: int) -> _Memory | None:
        with self._lock:
            for base, memory in self._memory.items():
                if base <= address < base + memory.nbytes:
                    return memory
        return None

    def _of(self, address: int) -> _Memory:
        found = self._found(address)
        if found is None:
            raise error("cuPointerGetAttribute", 1)
        return found

    def address_range(self, address: int) -> tuple[int, int]:
        memory = self._of(address)
        return memory.address, memory.nbytes

    def buffer_id(self, address: int) -> int:
        return self._of(address).number

    def pointer(self, address: int) -> Pointer | None:
        memory = self._found(address)
        return None if memory is None else Pointer(0, memory.number, True, False, False)

    def ipc_export(self, base: int) -> bytes:
        memory = self._memory[base]
        return _HANDLE.pack(os.getpid(), memory.fd, memory.nbytes).ljust(64, b"\0")

    def ipc_open(self, handle: bytes) -> int:
        pid, fd, nbytes = _HANDLE.unpack_from(handle)
        if pid == os.getpid():
            raise error("cuIpcOpenMemHandle_v2", _INVALID_CONTEXT)
        try:
            return self._map(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), nbytes)
        except OSError as exc:
            raise error("cuIpcOpenMemHandle_v2", 1) from exc

    ipc_close = free

    def vmm_granularity(self, ordinal: int) -> int:
        return 2 << 20

    def vmm_create(self, nbytes: int, ordinal: int) -> int:
        fd = os.memfd_create("soft-gpu")
        os.ftruncate(fd, nbytes)
        self._physical[fd] = (fd, nbytes)
        return fd

    def vmm_export(self, handle: int) -> int:
        return os.dup(handle)

    def vmm_import(self, fd: int) -> int:
        return os.dup(fd)

    def vmm_release(self, handle: int) -> None:
        os.close(handle)

    def vmm_map(self, handle: int, nbytes: int, ordinal: int) -> int:
        if os.fstat(handle).st_size < nbytes:
            raise error("cuMemMap", 1)
        return self._map(os.dup(handle), nbytes)

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        self.free(address)

    def host_register(self, address: int, nbytes: int, owner: object) -> int:
        self._pinned[address], self._owners[address] = nbytes, owner
        return address

    def host_unregister(self, address: int) -> None:
        """Waits for streams that are to read or write a word there, as the driver does for all that unmaps."""
        words = range(address, address + self._pinned[address])
        while not self.is_lost and any(at in words for at in list(self._touched.values())):
            time.sleep(0.0001)
        del self._pinned[address], self._owners[address]

    @property
    def pinned_bytes(self) -> int:
        return sum(self._pinned.values())

    # Streams

    def create_stream(self) -> int:
        handle = next(self._handles)
        self._streams[handle] = Stream(self)
        return handle

    def destroy_stream(self, stream: int) -> None:
        self._streams.pop(stream).end()

    def put(self, stream: int, work: Callable[[], None], node: Node = _HOST_FUNCTION) -> None:
        """Run it later, or at each launch of the graph that the stream is captured into. `node`: what the driver says
        of it in a graph."""
        capture = self._captures.get(stream)
        if capture is None:
            self._streams[stream].put(work)
        else:
            capture.work.append(work)
            capture.nodes.append(node)

    def is_stream_idle(self, stream: int) -> bool:
        self.check()
        if stream in self._captures:
            self._captures[stream].is_broken = True
            raise error("cuStreamQuery", _CAPTURE_UNSUPPORTED)
        found = self._streams[stream]
        return found.done >= found.last

    def synchronize_stream(self, stream: int) -> None:
        while not self.is_stream_idle(stream):
            time.sleep(0.0002)

    def synchronize(self) -> None:
        for stream in list(self._streams):
            self.synchronize_stream(stream)

    def create_event(self, *, is_timed: bool = False) -> int:
        handle = next(self._handles)
        self._events[handle] = (self._streams[0], 0)
        return handle

    def record_event(self, event: int, stream: int) -> None:
        found = self._streams[stream]
        found.put(lambda: self._times.__setitem__(event, time.perf_counter_ns()))
        self._events[event] = (found, found.last)

    def wait_event(self, stream: int, event: int) -> None:
        found, number = self._events[event]

        def wait() -> None:
            while found.done < number and not self.is_lost:
                time.sleep(0.0001)

        self.put(stream, wait)

    def is_event_done(self, event: int) -> bool:
        self.check()
        stream, number = self._events[event]
        return stream.done >= number

    def synchronize_event(self, event: int) -> None:
        while not self.is_event_done(event):
            time.sleep(0.0001)

    def elapsed_ns(self, start: int, end: int) -> int:
        return self._times[end] - self._times[start]

    def destroy_event(self, event: int) -> None:
        del self._events[event]
        self._times.pop(event, None)

    # Graphs

    def is_capturing(self, stream: int) -> bool:
        return stream in self._captures

    def capture_id(self, stream: int) -> int | None:
        capture = self._captures.get(stream)
        return None if capture is None else capture.number

    def capture_tail(self, stream: int) -> tuple[int, tuple[int, ...]]:
        capture = self._captures.get(stream)
        return (0, ()) if capture is None or not capture.work else (capture.number, (len(capture.work),))

    def capture_size(self, stream: int) -> int:
        capture = self._captures.get(stream)
        return 0 if capture is None else len(capture.nodes)

    def begin_capture(self, stream: int) -> None:
        self._captures[stream] = Capture(next(self._handles))

    def end_capture(self, stream: int) -> int:
        capture = self._captures.pop(stream)
        if capture.is_broken:
            raise error("cuStreamEndCapture", _CAPTURE_INVALIDATED)
        if not capture.work:
            capture.end()
            return 0
        self._graphs[capture.number] = capture
        return capture.number

    def launch_graph(self, graph: int, stream: int) -> None:
        for work in self._graphs[graph].work:
            self.put(stream, work)

    def destroy_graph(self, graph: int) -> None:
        self._graphs.pop(graph).end()

    end_recording, discard_recording = end_capture, destroy_graph

    def nodes(self, graph: int) -> tuple[Node, ...]:
        return tuple(self._graphs[graph].nodes)

    def allocation(self, address: int) -> Allocation | None:
        memory = self._found(address)
        return None if memory is None else Allocation(memory.address, memory.nbytes)

    def exchange_capture_mode(self, mode: int) -> int:
        before: int = getattr(self._thread, "mode", 0)
        self._thread.mode = mode
        return before

    def retain_in_graph(self, stream: int, counter: int) -> None:
        if stream not in self._captures:
            raise error("cuStreamGetCaptureInfo_v2", _ILLEGAL_STATE)
        self._captures[stream].counters.append(counter)

    def memory_info(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    # Copies and words

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if any(base <= source < base + size for base, size in self._pinned.items()):
            self.put(stream, lambda: ctypes.memmove(target, source, nbytes), _HOST_COPY)
            return
        data = ctypes.string_at(source, nbytes)  # pageable memory is read at once
        self.put(stream, lambda: ctypes.memmove(target, data, nbytes), _HOST_COPY)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.put(stream, lambda: ctypes.memmove(target, source, nbytes), _HOST_COPY)

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.put(stream, lambda: ctypes.memmove(target, source, nbytes), CopyNode(source, target, nbytes))

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        self.put(stream, lambda: ctypes.memset(address, 0, nbytes), FillNode(address, 0, 1, nbytes))

    def _put_memop(self, stream: int, address: int, work: Callable[[], None]) -> None:
        if stream in self._captures:
            self.put(stream, work)
            return
        number = next(self._ids)
        self._touched[number] = address

        def run() -> None:
            try:
                work()
            finally:
                del self._touched[number]

        self.put(stream, run)

    def write_value(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)

        def store() -> None:
            word.value = value

        self._put_memop(stream, address, store)

    def wait_value(self, stream: int, address: int, value: int, *, equal: bool = False) -> None:
        word = ctypes.c_uint32.from_address(address)

        def wait() -> None:
            while (word.value != value) if equal else (word.value - value) & 0xFFFF_FFFF >= 1 << 31:
                if self.is_lost:
                    return
                time.sleep(0.0001)

        self._put_memop(stream, address, wait)

    def write_and_wait(self, stream: int, address: int, value: int, waits_at: int, until: int) -> None:
        self.write_value(stream, address, value)
        self.wait_value(stream, waits_at, until)

    def ring_and_wait(self, stream: int, graph_slot: int, done: int) -> None:
        self.write_value(stream, done, 0)
        self.write_value(stream, graph_slot, 1)
        self.wait_value(stream, done, 1, equal=True)


driver = SoftDriver()


def install() -> SoftDriver:
    """Let this process see the GPU."""
    cuda.load.cache_clear()
    cuda.Driver = lambda: driver  # type: ignore[assignment,misc,return-value]
    return driver


def array_at(address: int, spec: Any) -> Any:
    """A NumPy array over memory of the GPU."""
    import numpy as np

    if not spec.numel:
        return np.empty(spec.shape, spec.dtype)
    strides = [step * spec.itemsize for step in spec.strides]
    reach = [(extent - 1) * stride for extent, stride in zip(spec.shape, strides, strict=True)]
    below, above = -sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
    memory = (ctypes.c_char * (below + above + spec.itemsize)).from_address(address - below)
    return np.ndarray(spec.shape, spec.dtype, buffer=memory, offset=below, strides=strides)
