"""The driver as it is: numbers, errors and contexts that ipc/cuda/driver.py takes for granted."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.gpu.conftest import finish, load, store, until
from tests.gpu.peer import Peer

from layerzero.ipc.cuda import abi
from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.errors import CudaError


def test_numbers_and_structures_are_those_of_cuda_bindings(driver: cuda.Driver) -> None:
    """A maintained binding was generated from the header; ours was written."""
    theirs: Any = pytest.importorskip("cuda.bindings.driver")
    attribute, pointer = theirs.CUdevice_attribute, theirs.CUpointer_attribute
    expected = {
        "MULTIPROCESSORS": attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        "MAJOR": attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        "MINOR": attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        "MEMORY_TYPE": pointer.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        "BUFFER_ID": pointer.CU_POINTER_ATTRIBUTE_BUFFER_ID,
        "IS_MANAGED": pointer.CU_POINTER_ATTRIBUTE_IS_MANAGED,
        "ORDINAL": pointer.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        "IS_LEGACY_IPC": pointer.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        "MEMPOOL": pointer.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        "DEVICE_MEMORY": theirs.CUmemorytype.CU_MEMORYTYPE_DEVICE,
        "POSIX_FD": theirs.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        "LAZY_PEER_ACCESS": theirs.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        "NON_BLOCKING": theirs.CUstream_flags.CU_STREAM_NON_BLOCKING,
        "DISABLE_TIMING": theirs.CUevent_flags.CU_EVENT_DISABLE_TIMING,
        "GEQ": theirs.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ,
        "EQ": theirs.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ,
        "CAPTURE_ACTIVE": theirs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE,
        "CAPTURE_THREAD_LOCAL": theirs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        "CAPTURE_GLOBAL": theirs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
        "CAPTURE_RELAXED": theirs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
        "NO_DESTRUCTOR_SYNC": theirs.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
        "MOVE": theirs.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE,
        "WAIT_32": theirs.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32,
        "WRITE_32": theirs.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32,
        "ILLEGAL_STATE": theirs.CUresult.CUDA_ERROR_ILLEGAL_STATE,
        "DEVICE_LOCATION": theirs.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE,
        "PINNED": theirs.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED,
        "READ_WRITE": theirs.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        "INVALID_VALUE": theirs.CUresult.CUDA_ERROR_INVALID_VALUE,
        "INVALID_DEVICE": theirs.CUresult.CUDA_ERROR_INVALID_DEVICE,
        "ALREADY_MAPPED": theirs.CUresult.CUDA_ERROR_ALREADY_MAPPED,
        "NOT_READY": theirs.CUresult.CUDA_ERROR_NOT_READY,
    }
    assert {name: getattr(abi, name) for name in expected} == {name: int(n) for name, n in expected.items()}
    assert ctypes.sizeof(abi.IpcHandle) == theirs.CU_IPC_HANDLE_SIZE


def test_capability_and_memory_agree_with_each_other(driver: cuda.Driver, current: cuda.Context) -> None:
    """They decide which kernels may run."""
    major, _ = driver.compute_capability(current.ordinal)
    free, total = driver.memory_info()
    assert major >= 5
    assert 0 < free <= total <= driver.total_bytes(current.ordinal)
    assert driver.multiprocessors(current.ordinal) > 0
    assert driver.version() >= 12000


def test_pointer_is_known_for_what_it_is(driver: cuda.Driver, current: cuda.Context) -> None:
    """Whether memory can be offered in place follows from this alone."""
    address = driver.allocate(2 << 20)
    try:
        found = driver.pointer(address + 4096)
        assert found is not None
        assert found == cuda.Pointer(
            current.ordinal, driver.buffer_id(address), is_legacy_ipc=True, is_managed=False, is_pooled=False
        )
        assert driver.address_range(address + 4096) == (address, 2 << 20)
        host = ctypes.create_string_buffer(8)
        assert driver.pointer(ctypes.addressof(host)) is None
    finally:
        driver.free(address)
    again = driver.allocate(2 << 20)
    assert driver.buffer_id(again) != found.buffer_id
    driver.free(again)


def test_exportable_memory_is_known_too(driver: cuda.Driver, current: cuda.Context) -> None:
    """It has no legacy handle, and the driver says so before one is asked for."""
    nbytes = max(2 << 20, driver.vmm_granularity(current.ordinal))
    physical = driver.vmm_create(nbytes, current.ordinal)
    address = driver.vmm_map(physical, nbytes, current.ordinal)
    try:
        found = driver.pointer(address)
        assert found is not None
        assert not found.is_legacy_ipc
        with pytest.raises(CudaError):
            driver.ipc_export(address)
    finally:
        driver.vmm_unmap(address, nbytes)
        driver.vmm_release(physical)


def test_more_memory_than_there_is_fails_and_nothing_else_does(driver: cuda.Driver, current: cuda.Context) -> None:
    """Out of memory is an answer, not a fault."""
    with pytest.raises(CudaError) as caught:
        driver.allocate(1 << 45)
    assert (caught.value.is_out_of_memory, caught.value.is_sticky) == (True, False)
    assert caught.value.facts["name"] == "CUDA_ERROR_OUT_OF_MEMORY"
    driver.free(driver.allocate(2 << 20))


def test_any_thread_works_within_the_context(driver: cuda.Driver, context: cuda.Context) -> None:
    """Python's garbage collector and the user's own threads come without one."""
    seen: list[object] = []

    def work() -> None:
        try:
            driver.allocate(2 << 20)
        except CudaError as exc:
            seen.append(exc.number)
        with context:
            driver.free(driver.allocate(2 << 20))
        seen.append(driver.current_context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [201, 0]


def test_stream_waits_for_the_event_of_another(driver: cuda.Driver, current: cuda.Context) -> None:
    """Two streams of one process are joined without the CPU."""
    page = ctypes.create_string_buffer(8192)
    start = -(-ctypes.addressof(page) // 4096) * 4096
    word = driver.host_register(start, 4096, page)
    first, second, event = driver.create_stream(), driver.create_stream(), driver.create_event()
    driver.wait_value(first, word, 1)
    driver.record_event(event, first)
    driver.wait_event(second, event)
    assert not driver.is_stream_idle(second)
    assert not driver.is_event_done(event)
    ctypes.c_uint32.from_address(start).value = 1
    finish(driver, second)
    driver.synchronize_event(event)
    driver.destroy_event(event)
    driver.destroy_stream(first)
    driver.destroy_stream(second)
    driver.host_unregister(start)


def test_time_between_two_events_is_the_gpus(driver: cuda.Driver, current: cuda.Context) -> None:
    """A wait for the CPU counts, since the stream stood still; events without time are refused."""
    page = ctypes.create_string_buffer(8192)
    start = -(-ctypes.addressof(page) // 4096) * 4096
    word = driver.host_register(start, 4096, page)
    stream = driver.create_stream()
    first, second = driver.create_event(is_timed=True), driver.create_event(is_timed=True)
    driver.record_event(first, stream)
    driver.wait_value(stream, word, 1)
    driver.record_event(second, stream)
    assert not driver.is_event_done(second)
    with pytest.raises(CudaError) as caught:
        driver.elapsed_ns(first, second)
    assert caught.value.number == abi.NOT_READY
    threading.Event().wait(0.02)
    ctypes.c_uint32.from_address(start).value = 1
    finish(driver, stream)
    assert 20_000_000 <= driver.elapsed_ns(first, second) < 10_000_000_000
    plain = driver.create_event()
    driver.record_event(plain, stream)
    finish(driver, stream)
    with pytest.raises(CudaError):
        driver.elapsed_ns(first, plain)
    for event in (first, second, plain):
        driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.host_unregister(start)


def test_captured_work_runs_at_each_launch(driver: cuda.Driver, current: cuda.Context) -> None:
    """And not before: what is captured is known by the capture's number."""
    stream, address = driver.create_stream(), driver.allocate(2 << 20)
    store(driver, address, b"one.", stream)
    assert (driver.is_capturing(stream), driver.capture_id(stream)) == (False, None)
    driver.begin_capture(stream)
    assert driver.is_capturing(stream)
    assert isinstance(driver.capture_id(stream), int)
    driver.copy_on_device(address + 256, address, 4, stream)
    graph = driver.end_capture(stream)
    for text in (b"two.", b"tree"):
        store(driver, address, text, stream)
        driver.launch_graph(graph, stream)
        assert load(driver, address + 256, 4, stream) == text
    driver.destroy_graph(graph)
    driver.destroy_stream(stream)
    driver.free(address)


def test_capture_of_nothing_is_no_graph(driver: cuda.Driver, current: cuda.Context) -> None:
    """A kernel that works elsewhere leaves one; its launch would do nothing."""
    stream = driver.create_stream()
    driver.begin_capture(stream)
    assert driver.end_capture(stream) == 0
    finish(driver, stream)
    driver.destroy_stream(stream)


def test_broken_capture_is_an_error_and_the_stream_usable(driver: cuda.Driver, current: cuda.Context) -> None:
    """A kernel that allocates must cost its graph only."""
    stream = driver.create_stream()
    driver.begin_capture(stream)
    with pytest.raises(CudaError):
        driver.synchronize_stream(stream)
    with pytest.raises(CudaError) as caught:
        driver.end_capture(stream)
    assert not caught.value.is_sticky
    finish(driver, stream)
    driver.destroy_stream(stream)


def test_capture_mode_of_this_thread_is_exchanged(driver: cuda.Driver, current: cuda.Context) -> None:
    """In a relaxed thread calls that a capture forbids are let through, and the capture stays whole."""
    stream = driver.create_stream()
    driver.begin_capture(stream)
    before = driver.exchange_capture_mode(abi.CAPTURE_RELAXED)
    address = driver.allocate(2 << 20)
    assert driver.exchange_capture_mode(before) == abi.CAPTURE_RELAXED
    assert driver.end_capture(stream) == 0
    driver.free(address)
    driver.destroy_stream(stream)


def test_graph_that_is_gone_is_counted(driver: cuda.Driver, current: cuda.Context) -> None:
    """Not when the capture ends, nor while what was instantiated lives."""
    stream, address = driver.create_stream(), driver.allocate(2 << 20)
    counter = (ctypes.c_uint32 * 8)()
    with pytest.raises(CudaError):
        driver.retain_in_graph(stream, ctypes.addressof(counter))
    driver.begin_capture(stream)
    driver.retain_in_graph(stream, ctypes.addressof(counter))
    driver.copy_on_device(address + 256, address, 4, stream)
    graph = driver.end_capture(stream)
    driver.launch_graph(graph, stream)
    finish(driver, stream)
    assert counter[0] == 0
    driver.destroy_graph(graph)
    until(lambda: counter[0] == 1)
    driver.destroy_stream(stream)
    driver.free(address)


@pytest.mark.parametrize(("kernel", "numbers"), [("illegal_address", {700}), ("trap", {719, 715})])
def test_fault_ends_its_process_and_no_other(
    driver: cuda.Driver, current: cuda.Context, start: Callable[..., Peer], kernel: str, numbers: set[int]
) -> None:
    """The error is sticky: the next call has it, too. The client's own work goes on beside it."""
    worker = start()
    (first, first_name, first_sticky), (second, _, second_sticky) = worker.ask("fault", gpu=current.gpu, kernel=kernel)
    assert (first in numbers, first_sticky, second, second_sticky) == (True, True, first, True), first_name
    address, stream = driver.allocate(2 << 20), driver.create_stream()
    store(driver, address, b"fine", stream)
    assert load(driver, address, 4, stream) == b"fine"
    driver.destroy_stream(stream)
    driver.free(address)
