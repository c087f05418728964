"""GPU memory between two processes, by each way there is, with the real driver."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.gpu.conftest import load, store
from tests.gpu.peer import Peer

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.handles import STAGED, TRANSPORTS
from layerzero.ipc.cuda.memory import Arena, InPlace, Pool
from layerzero.ipc.errors import CudaError, ProtocolError

MIB = 1 << 20


def arena_for(transport: str, context: cuda.Context, number: int = 1, nbytes: int = 4 * MIB) -> Arena:
    return Arena(context, "c1", number, nbytes, kind="vmm" if transport == "vmm" else "plain")


def let_go(worker: Peer, arena: Arena, *transports: str) -> None:
    """What a client does before it frees an arena."""
    keys = [arena.offer(transport)[0].key for transport in transports]
    for key in keys:
        worker.ask("retire", key=key, streams=[0])
    worker.reap(*keys)
    arena.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_cross_in_both_directions(
    driver: cuda.Driver, current: cuda.Context, worker: Peer, transport: str
) -> None:
    """What one GPU context writes, the other reads, anywhere in the arena; copies are counted."""
    arena, stream = arena_for(transport, current), driver.create_stream()
    handle, fd = arena.offer(transport)
    worker.open(handle, fd)
    for offset in (0, 256, 4 * MIB - 100):
        sent, answer = os.urandom(100), os.urandom(100)
        copied = 100 if transport in STAGED else 0
        store(driver, arena.address + offset, sent, stream)
        assert arena.publish(transport, offset, 100, stream) == copied
        load(driver, arena.address, 1, stream)
        assert worker.ask("read", key=handle.key, offset=offset, nbytes=100) == sent
        assert worker.ask("write", key=handle.key, offset=offset, data=answer) == copied
        assert arena.collect(transport, offset, 100, stream) == copied
        assert load(driver, arena.address + offset, 100, stream) == answer
    driver.destroy_stream(stream)
    let_go(worker, arena, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "float16", "float32", "float64", "int64"])
def test_strided_array_of_any_type_is_the_same_there(
    driver: cuda.Driver, current: cuda.Context, worker: Peer, transport: str, dtype: str
) -> None:
    """Only bytes cross: bfloat16 is two of them, fp8 one, packed fp4 half a one; strides and offset come along."""
    arena, stream = arena_for(transport, current), driver.create_stream()
    whole = np.frombuffer(os.urandom(64 * 48 * 8), dtype)[: 64 * 48].reshape(64, 48)
    view = whole[3::2, 5:40:7].T
    handle, fd = arena.offer(transport)
    worker.open(handle, fd)
    base = 768
    store(driver, arena.address + base, whole.tobytes(), stream)
    first = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    span = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + view.itemsize
    arena.publish(transport, base + first, span, stream)
    load(driver, arena.address, 1, stream)
    raw = worker.ask("read", key=handle.key, offset=base + first, nbytes=span)
    there = np.lib.stride_tricks.as_strided(np.frombuffer(raw, dtype, 1), view.shape, view.strides)
    assert there.tobytes() == view.tobytes()
    driver.destroy_stream(stream)
    let_go(worker, arena, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_way_works_here(context: cuda.Context, worker: Peer, transport: str) -> None:
    """The first is taken; users of other platforms live on the lower ones."""
    assert worker.tries(context, 1, transport) == ""


def test_worker_that_takes_the_clients_pid_for_its_own_says_so(context: cuda.Context, worker: Peer) -> None:
    """As in two containers."""
    assert "the same pid" in worker.tries(context, 1, "ipc", pid=worker.pid)
    assert worker.tries(context, 2, "vmm", pid=worker.pid) == ""


@pytest.fixture
def unshare() -> Callable[[str], list[str]]:
    """The command for a process in namespaces of its own, as in a container."""

    def command(kinds: str) -> list[str]:
        words = ["unshare", f"-{kinds}", "--fork", "--kill-child", "--mount-proc"]
        tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
        return words

    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    return command


@pytest.mark.parametrize("kinds", ["p", "pinu"])
def test_worker_in_a_container_is_reached_by_the_legacy_handle(
    context: cuda.Context,
    start: Callable[..., Peer],
    unshare: Callable[[str], list[str]],
    kinds: str,
) -> None:
    """Neither a common PID namespace nor a common /dev/shm, host name or network is needed."""
    assert start(*unshare(kinds)).tries(context, 1, "ipc") == ""


def test_two_containers_whose_processes_are_both_pid_1_take_the_next_transport(
    context: cuda.Context, start: Callable[..., Peer], unshare: Callable[[str], list[str]]
) -> None:
    """The usual case of containers, and the driver's error for it says nothing of pids."""
    client = start(*unshare("p"))
    told = client.ask("tries_of_its_own", gpu=context.gpu, prefix=unshare("p"), transports=["ipc", "vmm"])
    assert told == ["client and worker have the same pid, 1, in their namespaces", ""]


def test_gpu_is_the_same_whatever_each_side_calls_it(
    driver: cuda.Driver, context: cuda.Context, start: Callable[..., Peer]
) -> None:
    """A worker sees one GPU as its number 0, whichever it is here."""
    worker = start(CUDA_VISIBLE_DEVICES=context.gpu)
    assert worker.ask("gpus") == [context.gpu]
    assert worker.tries(context, 2, "ipc") == ""
    arena = arena_for("ipc", context)
    handle, _ = arena.offer("ipc")
    worker.open(handle, None)
    data = os.urandom(64)
    worker.ask("write", key=handle.key, offset=512, data=data)
    with context:
        stream = driver.create_stream()
        assert load(driver, arena.address + 512, 64, stream) == data
        driver.destroy_stream(stream)
    let_go(worker, arena, "ipc")


def test_worker_that_does_not_see_the_gpu_says_so(context: cuda.Context, start: Callable[..., Peer]) -> None:
    """Not a wrong GPU, not a hang."""
    handle, _ = arena_for("ipc", context).offer("ipc")
    with pytest.raises(CudaError, match="CUDA_ERROR_NO_DEVICE"):
        start(CUDA_VISIBLE_DEVICES="-1").open(handle, None)
    with pytest.raises(CudaError, match="GPU-nowhere is not visible"):
        start().open(replace(handle, gpu="GPU-nowhere"), None)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_arena_that_claims_more_than_it_has_is_refused(context: cuda.Context, worker: Peer, transport: str) -> None:
    """The rest would be other memory of the client, or a fault."""
    arena = arena_for(transport, context)
    handle, fd = arena.offer(transport)
    with pytest.raises((ProtocolError, CudaError)):
        worker.open(replace(handle, nbytes=2 * handle.nbytes), fd)
    worker.open(handle, fd)
    let_go(worker, arena, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_freed_arena_gives_its_memory_back_and_a_new_one_opens(
    driver: cuda.Driver, current: cuda.Context, worker: Peer, transport: str
) -> None:
    """Many times: handles and addresses come back for other memory, keys do not."""
    stream = driver.create_stream()
    first = arena_for(transport, current, 99)
    worker.open(*first.offer(transport))  # now its context is there, which needs memory, too
    let_go(worker, first, transport)
    free = driver.memory_info()[0]
    for number in range(5):
        arena = arena_for(transport, current, number, 64 * MIB)
        handle, fd = arena.offer(transport)
        worker.open(handle, fd)
        data = os.urandom(32)
        worker.ask("write", key=handle.key, offset=number * 512, data=data)
        arena.collect(transport, number * 512, 32, stream)
        assert load(driver, arena.address + number * 512, 32, stream) == data
        let_go(worker, arena, transport)
    assert driver.memory_info()[0] >= free - 32 * MIB
    driver.destroy_stream(stream)


def test_memory_of_a_killed_worker_is_the_clients_again(
    driver: cuda.Driver, current: cuda.Context, start: Callable[..., Peer]
) -> None:
    """The driver drops a dead process's mappings; the bytes that it wrote stay."""
    worker = start()
    arena, stream = arena_for("ipc", current), driver.create_stream()
    handle, _ = arena.offer("ipc")
    worker.open(handle, None)
    worker.ask("write", key=handle.key, offset=0, data=b"last words")
    worker.kill()
    assert load(driver, arena.address, 10, stream) == b"last words"
    second = start()
    second.open(handle, None)
    assert second.ask("read", key=handle.key, offset=0, nbytes=10) == b"last words"
    driver.destroy_stream(stream)
    let_go(second, arena, "ipc")


def test_slots_of_a_pool_cross_by_their_offset(
    driver: cuda.Driver, current: cuda.Context, worker: Peer, numbers: itertools.count[int]
) -> None:
    """One handle serves all slots of an arena."""
    pool, stream = Pool(current, "c1", numbers), driver.create_stream()
    blocks = [pool.take(1000, stream) for _ in range(3)]
    handle, _ = blocks[0].arena.offer("ipc")
    worker.open(handle, None)
    for index, block in enumerate(blocks):
        assert block.address % 256 == 0
        store(driver, block.address, bytes([index]) * 1000, stream)
    load(driver, blocks[0].address, 1, stream)
    for index, block in enumerate(blocks):
        assert worker.ask("read", key=handle.key, offset=block.offset, nbytes=1000) == bytes([index]) * 1000
        pool.give(block)
    assert pool.trim() == [blocks[0].arena]
    let_go(worker, blocks[0].arena, "ipc")
    driver.destroy_stream(stream)


def test_torch_tensor_is_seen_where_it_lies(
    driver: cuda.Driver, current: cuda.Context, worker: Peer, numbers: itertools.count[int]
) -> None:
    """The caching allocator's blocks are ordinary memory; emptying its cache is noticed."""
    torch = pytest.importorskip("torch")
    in_place = InPlace(current, "c1", numbers)
    device = f"cuda:{current.ordinal}"
    pad = torch.empty(10_000, device=device)
    tensor = torch.arange(6000, dtype=torch.bfloat16, device=device).reshape(60, 100)[5:20, 10:90]
    torch.cuda.synchronize(device)
    found = in_place.find(tensor.data_ptr(), 2)
    assert not isinstance(found, str), found
    arena, offset = found
    handle, _ = arena.offer("ipc")
    worker.open(handle, None)
    raw = worker.ask("read", key=handle.key, offset=offset, nbytes=15 * 100 * 2 - 40)
    there = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).as_strided(tensor.shape, tensor.stride())
    assert torch.equal(there, tensor.cpu())
    assert in_place.take_stale() == []
    let_go(worker, arena, "ipc")
    del pad, tensor
    gc.collect()
    torch.cuda.empty_cache()
    assert in_place.take_stale() == [arena]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("expandable_segments:False", ""),
        ("expandable_segments:True", "its allocation cannot be shared, as with torch's expandable segments"),
        ("backend:cudaMallocAsync", "it comes from a cudaMallocAsync pool"),
    ],
)
def test_allocator_whose_memory_cannot_be_shared_is_named(
    context: cuda.Context, start: Callable[..., Peer], config: str, reason: str
) -> None:
    """Its tensors are copied once, and the report says why."""
    pytest.importorskip("torch")
    worker = start(PYTORCH_CUDA_ALLOC_CONF=config, PYTORCH_ALLOC_CONF=config, CUDA_VISIBLE_DEVICES=context.gpu)
    assert worker.ask("in_place", gpu=context.gpu) == reason


def test_descriptors_do_not_pile_up(context: cuda.Context, worker: Peer, numbers: itertools.count[int]) -> None:
    """A client makes arenas for months."""
    for transport in TRANSPORTS:  # the driver opens some for itself
        assert worker.tries(context, next(numbers), transport) == ""

    def files() -> int:
        pids = (os.getpid(), worker.pid)
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)

    before = files()
    for transport in TRANSPORTS:
        for _ in range(3):
            assert worker.tries(context, next(numbers), transport) == ""
    assert files() <= before
