"""What the CUDA driver does, as methods: the one module that calls its functions. Used by clients and workers.

cuda_library.py says how they are called, cuda_abi.py has their numbers and structures.

Handles are plain ints. Every function needs a current context unless it says otherwise: use `with context:`, in any
thread. ctypes releases the interpreter's lock during a call, on purpose: enqueuing blocks when a stream is full, and
what drains it may be another thread of this process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import uuid
from ctypes import byref, c_float, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from layerzero.ipc.cuda import abi
from layerzero.ipc.cuda.graph_nodes import GraphNodes
from layerzero.ipc.cuda.kernels import Kernels
from layerzero.ipc.cuda.library import LIBRARY
from layerzero.ipc.errors import CudaError


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees. `ordinal` means something in this process only; `uuid` everywhere."""

    ordinal: int
    uuid: str  # "GPU-" and 8-4-4-4-12 hexadecimal digits; of the compute instance where MIG is on


@dataclass(frozen=True)
class Pointer:
    """What the driver knows about an address of device memory."""

    ordinal: int
    buffer_id: int  # of its allocation; never used twice in a process
    is_legacy_ipc: bool  # cuIpcGetMemHandle takes its allocation
    is_managed: bool
    is_pooled: bool  # from cudaMallocAsync


def _has_mps_daemon() -> bool:
    """Where processes find it: https://docs.nvidia.com/deploy/mps (CUDA_MPS_PIPE_DIRECTORY)."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text(encoding="ascii"))
        os.kill(pid, 0)
    except PermissionError:
        return True  # it is another user's
    except (OSError, ValueError):
        return False
    return True


class _Batch(threading.local):
    """A thread's operations on words; the driver writes to them, too."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(abi.THREE_WORD_OPS.size)


class Driver(Kernels, GraphNodes):
    """libcuda, initialised. Every method may raise CudaError."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raises OSError when there is no such library."""
        super().__init__(library)
        self._has_batches = hasattr(self._library, "cuStreamBatchMemOp_v2")  # since CUDA 11.7
        self.has_context_events = hasattr(self._library, "cuCtxRecordEvent")  # since CUDA 12.5
        self._batch = _Batch()
        self._registered: dict[int, object] = {}  # address -> what keeps the pages mapped
        self._call("cuInit", 0)

    # Devices and contexts. None of these needs a current context.

    def version(self) -> int:
        """Of CUDA, as 1000 * major + 10 * minor."""
        return self._int("cuDriverGetVersion")

    def gpus(self) -> tuple[Gpu, ...]:
        """Those that CUDA_VISIBLE_DEVICES leaves to this process, in the driver's order."""
        found = []
        for ordinal in range(self._int("cuDeviceGetCount")):
            raw = (c_ubyte * 16)()
            self._call("cuDeviceGetUuid_v2", byref(raw), self._int("cuDeviceGet", ordinal))
            found.append(Gpu(ordinal, f"GPU-{uuid.UUID(bytes=bytes(raw))}"))
        return tuple(found)

    def name(self, ordinal: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), ordinal)
        return text.value.decode(errors="replace")

    def total_bytes(self, ordinal: int) -> int:
        nbytes = c_size_t()
        self._call("cuDeviceTotalMem_v2", byref(nbytes), ordinal)
        return nbytes.value

    def compute_capability(self, ordinal: int) -> tuple[int, int]:
        major, minor = (self._int("cuDeviceGetAttribute", which, ordinal) for which in (abi.MAJOR, abi.MINOR))
        return major, minor

    def multiprocessors(self, ordinal: int) -> int:
        return self._int("cuDeviceGetAttribute", abi.MULTIPROCESSORS, ordinal)

    def has_mps(self, ordinal: int) -> bool:
        """Whether this process shares the GPU with others by MPS: the driver says so, or MPS's daemon runs here."""
        value = c_int()
        is_told = not self._code("cuDeviceGetAttribute", byref(value), abi.MPS_ENABLED, ordinal) and bool(value.value)
        return is_told or _has_mps_daemon()

    def retain_context(self, ordinal: int) -> int:
        """The primary context, which all libraries of this process share; made if need be (about 500 MiB)."""
        return self._handle("cuDevicePrimaryCtxRetain", ordinal)

    def push_context(self, context: int) -> None:
        self._call("cuCtxPushCurrent_v2", context)

    def pop_context(self) -> int:
        return self._handle("cuCtxPopCurrent_v2")

    def current_context(self) -> int:
        """0 where this thread has none."""
        return self._handle("cuCtxGetCurrent")

    def synchronize(self) -> None:
        """Block until all work of the current context is done, also what waits for other processes."""
        self._call("cuCtxSynchronize")

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Plain device memory: the kind that every legacy IPC handle needs."""
        return self._u64("cuMemAlloc_v2", nbytes)

    def free(self, address: int) -> None:
        """May block until the device is idle."""
        self._call("cuMemFree_v2", address)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def address_range(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation or mapping that an address lies in."""
        base, nbytes = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address)
        return base.value, nbytes.value

    def buffer_id(self, address: int) -> int:
        """Of the allocation that an address lies in; never used twice in a process."""
        return self._pointer_attribute(abi.BUFFER_ID, address)

    def pointer(self, address: int) -> Pointer | None:
        """None for what is not device memory."""
        try:
            if self._pointer_attribute(abi.MEMORY_TYPE, address) != abi.DEVICE_MEMORY:
                return None
        except CudaError as exc:
            if exc.number == abi.INVALID_VALUE:  # an address that CUDA does not know
                return None
            raise
        return Pointer(
            ordinal=self._pointer_attribute(abi.ORDINAL, address),
            buffer_id=self._pointer_attribute(abi.BUFFER_ID, address),
            is_legacy_ipc=bool(self._pointer_attribute(abi.IS_LEGACY_IPC, address)),
            is_managed=bool(self._pointer_attribute(abi.IS_MANAGED, address)),
            is_pooled=bool(self._pointer_attribute(abi.MEMPOOL, address)),
        )

    def _pointer_attribute(self, attribute: int, address: int) -> int:
        # The driver writes 1, 4 or 8 bytes, by attribute; on a little-endian machine zeros in the rest fit all.
        value = c_uint64(0)
        self._call("cuPointerGetAttribute", byref(value), attribute, address)
        return value.value

    # Legacy IPC

    def ipc_export(self, base: int) -> bytes:
        handle = abi.IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle.reserved)

    def ipc_open(self, handle: bytes) -> int:
        """The base of the exporter's allocation, here. Opening twice counts, closing counts back."""
        return self._u64("cuIpcOpenMemHandle_v2", abi.IpcHandle.from_buffer_copy(handle), abi.LAZY_PEER_ACCESS)

    def ipc_close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    # Memory by file descriptor ("virtual memory management"). No current context needed.

    def vmm_granularity(self, ordinal: int) -> int:
        nbytes = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(nbytes), byref(abi.exportable(ordinal)), 0)
        return nbytes.value

    def vmm_create(self, nbytes: int, ordinal: int) -> int:
        """Physical memory that can be exported. `nbytes`: a multiple of the granularity."""
        return self._u64("cuMemCreate", nbytes, byref(abi.exportable(ordinal)), 0)

    def vmm_export(self, handle: int) -> int:
        """A file descriptor, which the caller owns. The memory lives until the last descriptor, handle and mapping."""
        return self._int("cuMemExportToShareableHandle", handle, abi.POSIX_FD, 0)

    def vmm_import(self, fd: int) -> int:
        return self._u64("cuMemImportFromShareableHandle", fd, abi.POSIX_FD)

    def vmm_release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def vmm_map(self, handle: int, nbytes: int, ordinal: int) -> int:
        """Map physical memory at an address of the driver's choice. Fails for more bytes than the memory has."""
        address = self._u64("cuMemAddressReserve", nbytes, 0, 0, 0)
        try:
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
            try:
                access = abi.AccessDesc(abi.Location(abi.DEVICE_LOCATION, ordinal), abi.READ_WRITE)
                self._call("cuMemSetAccess", address, nbytes, byref(access), 1)
            except CudaError:
                self._call("cuMemUnmap", address, nbytes)
                raise
        except CudaError:
            self._call("cuMemAddressFree", address, nbytes)
            raise
        return address

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)
        self._call("cuMemAddressFree", address, nbytes)

    # Host memory

    def host_register(self, address: int, nbytes: int, owner: object) -> int:
        """Pin pages of this process for the GPU; returns their address there. About 0.1 s a GB.

        `owner` keeps them mapped and is kept until `host_unregister`: copies to memory that is mapped there later would
        go to the pages that were.
        """
        self._call("cuMemHostRegister_v2", address, nbytes, abi.PORTABLE_AND_MAPPED)
        try:
            there = self._u64("cuMemHostGetDevicePointer_v2", address, 0)
        except CudaError:
            self.host_unregister(address)
            raise
        self._registered[address] = owner
        return there

    def host_unregister(self, address: int) -> None:
        """To be called before the pages are unmapped."""
        self._call("cuMemHostUnregister", address)
        self._registered.pop(address, None)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """`source`: an address of this process; pinned ones are read later, others before this returns."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, nbytes, stream)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """`target`: an address of this process; this returns early only for pinned ones."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, nbytes, stream)

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        """Zero bytes."""
        self._call("cuMemsetD8Async", address, 0, nbytes, stream)

    # Streams and events. Stream 0 is the current context's legacy default stream.

    def create_stream(self) -> int:
        """One that does not wait for the default stream."""
        return self._handle("cuStreamCreate", abi.NON_BLOCKING)

    def synchronize_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def is_stream_idle(self, stream: int) -> bool:
        return self._is_ready("cuStreamQuery", stream)

    def destroy_stream(self, stream: int) -> None:
        """Does not wait; what was enqueued still runs."""
        self._call("cuStreamDestroy_v2", stream)

    def create_event(self, *, is_timed: bool = False) -> int:
        return self._handle("cuEventCreate", 0 if is_timed else abi.DISABLE_TIMING)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def record_context(self, context: int, event: int) -> None:
        """After all that was enqueued in the context. Needs has_context_events. While a stream of the context is
        captured it raises CudaError and breaks that capture."""
        self._call("cuCtxRecordEvent", context, event)

    def is_event_done(self, event: int) -> bool:
        return self._is_ready("cuEventQuery", event)

    def synchronize_event(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def elapsed_ns(self, start: int, end: int) -> int:
        """Between two timed events that are done, as the GPU's clock has it; about half a microsecond exact."""
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), start, end)
        return round(milliseconds.value * 1e6)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def wait_event(self, stream: int, event: int) -> None:
        """Later work of the stream waits for the event's last record."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    # Words in memory that order streams ("memops"). `address`: device memory, or the device's address of pinned memory.

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Store a 32-bit word after all earlier work of the stream, which whoever sees the word sees, too."""
        self._call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def wait_value(self, stream: int, address: int, value: int, *, equal: bool = False) -> None:
        """Hold the stream until (int32)(word - value) >= 0; or, with `equal`, until the word is `value`."""
        self._call("cuStreamWaitValue32_v2", stream, address, value, abi.EQ if equal else abi.GEQ)

    def write_and_wait(self, stream: int, address: int, value: int, waits_at: int, until: int) -> None:
        """`write_value`, then `wait_value`, in one call where the driver has it."""
        if not self._has_batches:
            self.write_value(stream, address, value)
            self.wait_value(stream, waits_at, until)
            return
        ops, buffer = abi.TWO_WORD_OPS, self._batch.buffer
        ops.pack_into(buffer, 0, abi.WRITE_32, address, value, 0, 0, abi.WAIT_32, waits_at, until, abi.GEQ, 0)
        self._call("cuStreamBatchMemOp_v2", stream, 2, buffer, 0)

    def ring_and_wait(self, stream: int, graph_slot: int, done: int) -> None:
        """Store 0 at `done` and 1 at `graph_slot`, then hold the stream until `done` is 1; as one node of a graph."""
        write, wait = abi.WRITE_32, abi.WAIT_32
        self._three_words(stream, (write, done, 0, 0), (write, graph_slot, 1, 0), (wait, done, 1, abi.EQ))

    def tell_and_take(self, stream: int, told: int, taken: int) -> None:
        """Store 1 at `told`, hold the stream until `taken` is 1, and store 0 there; as one node of a graph."""
        write, wait = abi.WRITE_32, abi.WAIT_32
        self._three_words(stream, (write, told, 1, 0), (wait, taken, 1, abi.EQ), (write, taken, 0, 0))

    def _three_words(self, stream: int, *ops: tuple[int, int, int, int]) -> None:
        """Each: what, address, value, flags."""
        if self._has_batches:
            abi.THREE_WORD_OPS.pack_into(self._batch.buffer, 0, *(field for op in ops for field in (*op, 0)))
            self._call("cuStreamBatchMemOp_v2", stream, 3, self._batch.buffer, 0)
            return
        for kind, *rest in ops:
            self._call("cuStreamWaitValue32_v2" if kind == abi.WAIT_32 else "cuStreamWriteValue32_v2", stream, *rest)

    # Graphs

    def exchange_capture_mode(self, mode: int) -> int:
        """Which calls a capture refuses to this thread (cuda_abi.CAPTURE_*). Returns what it was."""
        value = c_int(mode)
        self._call("cuThreadExchangeStreamCaptureMode", byref(value))
        return value.value

    def retain_in_graph(self, stream: int, counter: int) -> None:
        """Count the u32 at `counter` up when the graph that the stream is captured into is gone, and all that was
        instantiated from it.

        `counter`: an address of 32 bytes that are zero and stay. What counts is libc's sem_post, so that no Python runs
        in the driver's threads. Raises CudaError when the stream is not captured.
        """
        status, graph = c_int(), c_void_p()
        self._call("cuStreamGetCaptureInfo_v2", stream, byref(status), None, byref(graph), None, None)
        if status.value != abi.CAPTURE_ACTIVE:
            raise self._error("cuStreamGetCaptureInfo_v2", abi.ILLEGAL_STATE)
        count = ctypes.cast(ctypes.CDLL(None).sem_post, c_void_p)
        kept = self._handle("cuUserObjectCreate", counter, count, 1, abi.NO_DESTRUCTOR_SYNC)
        try:
            self._call("cuGraphRetainUserObject", graph, kept, 1, abi.MOVE)
        except CudaError:
            self._call("cuUserObjectRelease", kept, 1)
            raise

    def is_capturing(self, stream: int) -> bool:
        """True also when the capture has become invalid: nothing may be enqueued for execution then either."""
        status = c_int()
        self._call("cuStreamIsCapturing", stream, byref(status))
        return status.value != 0

    def capture_id(self, stream: int) -> int | None:
        """Of the capture that the stream takes part in, unique in this process; None when it takes part in none."""
        status, number = c_int(), c_uint64()
        self._call("cuStreamGetCaptureInfo_v2", stream, byref(status), byref(number), None, None, None)
        return number.value if status.value == abi.CAPTURE_ACTIVE else None

    def capture_tail(self, stream: int) -> tuple[int, tuple[int, ...]]:
        """The capture that the stream takes part in, and the nodes after which it adds its next one. (0, ()) where that
        cannot be told."""
        status, number, nodes, count = c_int(), c_uint64(), c_void_p(), c_size_t()
        try:
            self._call(
                "cuStreamGetCaptureInfo_v2", stream, byref(status), byref(number), None, byref(nodes), byref(count)
            )
        except CudaError as exc:
            if exc.is_sticky:
                raise
            return 0, ()  # edges with data, such as those of programmatic launches, are not told
        if status.value != abi.CAPTURE_ACTIVE or not nodes.value:
            return 0, ()
        return number.value, tuple((c_void_p * count.value).from_address(nodes.value))

    def capture_size(self, stream: int) -> int:
        """How many nodes the graph has by now that the stream is captured into; 0 where that cannot be told."""
        status, graph, nodes = c_int(), c_void_p(), c_size_t()
        try:
            self._call("cuStreamGetCaptureInfo_v2", stream, byref(status), None, byref(graph), None, None)
            if status.value == abi.CAPTURE_ACTIVE:
                self._call("cuGraphGetNodes", graph, None, byref(nodes))
        except CudaError as exc:
            if exc.is_sticky:
                raise
        return int(nodes.value)

    def begin_capture(self, stream: int) -> None:
        """Calls that would break a capture are refused to this thread only."""
        self._call("cuStreamBeginCapture_v2", stream, abi.CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """An executable graph; 0 when nothing was captured.

        Raises CudaError when the capture was broken; the stream is usable again.
        """
        graph, nodes = c_void_p(), c_size_t()
        self._call("cuStreamEndCapture", stream, byref(graph))
        try:
            self._call("cuGraphGetNodes", graph, None, byref(nodes))
            if nodes.value == 0:
                return 0
            return self._handle("cuGraphInstantiateWithFlags", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)


class Context:
    """The primary context of a GPU, named by its UUID. `with context:` makes it current in this thread, nested or not.

    It stays retained until the process ends: memory, streams and mappings of any thread may depend on it.
    """

    def __init__(self, driver: Driver, gpu: str) -> None:
        """Raises CudaError when this process does not see the GPU."""
        self.driver = driver
        visible = {found.uuid: found.ordinal for found in driver.gpus()}
        if gpu not in visible:
            raise CudaError(
                f"GPU {gpu} is not visible to this process, which sees {', '.join(visible) or 'none'}; "
                "CUDA_VISIBLE_DEVICES must name it",
                call="cuDeviceGetUuid_v2", number=abi.INVALID_DEVICE, name="CUDA_ERROR_INVALID_DEVICE", sticky=False,
            )  # fmt: skip
        self.gpu = gpu
        self.ordinal = visible[gpu]
        self.handle = driver.retain_context(self.ordinal)

    def is_current(self) -> bool:
        """In this thread."""
        return self.driver.current_context() == self.handle

    def __enter__(self) -> Context:
        self.driver.push_context(self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.pop_context()


def read_back(driver: Driver, address: int, nbytes: int, stream: int) -> bytes:
    """Bytes of device memory, once the stream has come to them."""
    target = (ctypes.c_char * nbytes)()
    driver.copy_to_host(ctypes.addressof(target), address, nbytes, stream)
    driver.synchronize_stream(stream)
    return bytes(target)


@functools.cache
def load() -> Driver:
    """This process's driver. Raises OSError without one, CudaError when it fails."""
    return Driver()
