"""A worker's mappings of GPU arenas: opened once, not after they are retired, closed after the work that uses them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error

from layerzero.ipc.cuda import mappings
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import TRANSPORTS, ArenaHandle
from layerzero.ipc.cuda.mappings import Mappings
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.errors import CudaError, ProtocolError

MIB = 1 << 20


class Pair:
    """A client and a worker on one GPU."""

    def __init__(self) -> None:
        gpu = FakeGpu()
        self.client, self.worker = FakeDriver(gpu), FakeDriver(gpu)
        self.context = Context(self.client, UUID)
        self.mappings = Mappings(lambda uuid: Context(self.worker, uuid))
        self.arenas: list[Arena] = []

    def arena(self, kind: str = "plain") -> Arena:
        self.arenas.append(Arena(self.context, "c1", len(self.arenas) + 1, 2 * MIB, kind=kind))
        return self.arenas[-1]

    def offer(self, transport: str = "ipc") -> tuple[ArenaHandle, int | None]:
        """As it arrives: the descriptor is the receiver's own."""
        handle, fd = self.arena("vmm" if transport == "vmm" else "plain").offer(transport)
        return handle, None if fd is None else os.dup(fd)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.worker.held.clear()
    pair.mappings.close()
    for arena in pair.arenas:
        arena.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_arena_is_opened_once(pair: Pair, transport: str) -> None:
    """Opening costs up to a millisecond."""
    handle, fd = pair.offer(transport)
    again = None if fd is None else os.dup(fd)
    mapping = pair.mappings.open(handle, fd)
    opened = len(pair.worker.mapped)
    assert pair.mappings.open(handle, again) is mapping is pair.mappings.get(handle.key)
    assert (len(pair.worker.mapped), len(pair.mappings)) == (opened, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closed_mappings_leave_nothing(pair: Pair, transport: str) -> None:
    """A mapping that stays holds the client's memory after its death."""
    handle, fd = pair.offer(transport)
    before = len(os.listdir("/proc/self/fd"))
    pair.mappings.open(handle, fd)
    pair.mappings.close()
    assert (pair.worker.mapped, pair.worker.pinned, len(pair.mappings)) == ({}, {}, 0)
    assert len(os.listdir("/proc/self/fd")) == before - (fd is not None)


def test_one_key_cannot_mean_two_memories(pair: Pair) -> None:
    """The second would be written to the first."""
    handle, _ = pair.offer()
    pair.mappings.open(handle)
    with pytest.raises(ProtocolError, match="described in two ways"):
        pair.mappings.open(replace(handle, handle=pair.offer()[0].handle))


def test_arena_that_is_retired_is_used_again_only_when_it_is_lent_again(pair: Pair) -> None:
    """It may be, before it is unmapped: the driver maps nothing twice."""
    handle, _ = pair.offer()
    pair.mappings.open(handle)
    pair.worker.held.add(5)
    pair.mappings.retire(handle.key, [5])
    with pytest.raises(ProtocolError, match="not mapped"):
        pair.mappings.get(handle.key)
    with pytest.raises(ProtocolError, match="described in two ways"):
        pair.mappings.open(replace(handle, handle=pair.offer()[0].handle))
    with pytest.raises(ProtocolError, match="not mapped"):
        pair.mappings.retire(handle.key, [])
    pair.mappings.open(replace(handle, generation=handle.generation + 1))
    again = pair.mappings.open(handle)
    assert (again, again.events) == (pair.mappings.get(handle.key), [])
    pair.worker.held.clear()
    assert pair.mappings.reap() == []


def test_retired_arena_is_unmapped_after_the_work_that_uses_it(pair: Pair) -> None:
    """A kernel that still runs would fault, and a fault ends the worker."""
    handle, _ = pair.offer()
    address = pair.mappings.open(handle).address
    pair.worker.held.add(5)
    pair.mappings.retire(handle.key, [4, 5])
    assert pair.mappings.reap() == []
    assert address in pair.worker.mapped
    pair.worker.held.clear()
    assert pair.mappings.reap() == [handle.key]
    assert (pair.worker.mapped, pair.worker.events) == ({}, {})
    assert pair.mappings.reap() == []


@pytest.mark.parametrize("transport", ["ipc", "vmm", "staged"])
def test_arena_that_is_smaller_than_it_says_is_refused(pair: Pair, transport: str) -> None:
    """Views beyond its end would be other people's memory."""
    handle, fd = pair.offer(transport)
    with pytest.raises((ProtocolError, CudaError)):
        pair.mappings.open(replace(handle, nbytes=4 * MIB), fd)
    assert (pair.worker.mapped, pair.worker.pinned, len(pair.mappings)) == ({}, {}, 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_descriptor_is_closed_whatever_happens(pair: Pair, transport: str) -> None:
    """A peer that sends nonsense must not use ours up."""
    handle, _ = pair.offer()
    wrong = replace(handle, transport=transport, handle=b"", gpu="GPU-elsewhere")
    fd = os.memfd_create("x")
    with pytest.raises((ProtocolError, CudaError)):
        pair.mappings.open(wrong, fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_descriptor_that_is_missing_is_asked_for(pair: Pair) -> None:
    """None is not a descriptor."""
    handle, fd = pair.offer("vmm")
    assert fd is not None
    os.close(fd)
    with pytest.raises(ProtocolError, match="transport vmm travels with a file descriptor"):
        pair.mappings.open(handle)


def test_gpu_that_is_not_visible_is_named(pair: Pair) -> None:
    """Ordinals would have hit the wrong GPU in silence."""
    with pytest.raises(CudaError, match="GPU-elsewhere is not visible"):
        pair.mappings.open(replace(pair.offer()[0], gpu="GPU-elsewhere"))


def test_stale_mapping_in_the_way_is_closed_and_opening_tried_again(pair: Pair) -> None:
    """The client freed memory early; its new memory lies where the old is still mapped."""
    stale, fresh = pair.offer()[0], pair.offer()[0]
    pair.mappings.open(stale)
    pair.mappings.retire(stale.key, [])
    pair.worker.fails["ipc_open"] = error("cuIpcOpenMemHandle_v2", 208)
    pair.worker.times["ipc_open"] = 1
    mapping = pair.mappings.open(fresh)
    assert list(pair.worker.mapped) == [mapping.address]


def test_memory_in_the_way_that_is_in_use_is_an_error(pair: Pair) -> None:
    """The pair goes to another transport for this arena."""
    pair.worker.fails["ipc_open"] = error("cuIpcOpenMemHandle_v2", 208)
    pair.worker.times["ipc_open"] = -1
    with pytest.raises(CudaError, match="208"):
        pair.mappings.open(pair.offer()[0])
    assert pair.worker.calls["ipc_open"] == 1


def test_number_of_mappings_is_limited(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client must not use up the address space of all."""
    monkeypatch.setattr(mappings, "MAX_MAPPINGS", 2)
    for _ in range(2):
        pair.mappings.open(pair.offer()[0])
    with pytest.raises(ProtocolError, match="more than 2 arenas"):
        pair.mappings.open(pair.offer()[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_cross_in_both_directions(pair: Pair, transport: str) -> None:
    """Staged transports copy, and count; the others are the same memory."""
    arena = pair.arena("vmm" if transport == "vmm" else "plain")
    handle, fd = arena.offer(transport)
    mapping = pair.mappings.open(handle, None if fd is None else os.dup(fd))
    copied = 0 if transport in ("ipc", "vmm") else 16

    def view(driver: FakeDriver, address: int) -> memoryview:
        memory, offset = driver._bytes(address, 16)
        return memoryview(memory)[offset : offset + 16]

    view(pair.client, arena.address + 512)[:] = b"from the client."
    assert arena.publish(transport, 512, 16, 0) == copied
    assert mapping.collect(512, 16, 0) == copied
    assert view(pair.worker, mapping.at(512, 16)) == b"from the client."
    view(pair.worker, mapping.at(512, 16))[:] = b"from the worker."
    assert mapping.publish(512, 16, 0) == copied
    assert arena.collect(transport, 512, 16, 0) == copied
    assert view(pair.client, arena.address + 512) == b"from the worker."


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (2 * MIB, 1), (0, 2 * MIB + 1), (2**64 - 1, 2)])
def test_bytes_outside_the_arena_have_no_address(pair: Pair, offset: int, nbytes: int) -> None:
    """Offsets come from another process."""
    mapping = pair.mappings.open(pair.offer()[0])
    for use in (mapping.at, lambda o, n: mapping.collect(o, n, 0), lambda o, n: mapping.publish(o, n, 0)):
        with pytest.raises(ProtocolError, match="not within"):
            use(offset, nbytes)
