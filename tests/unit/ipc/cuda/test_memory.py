"""A client's GPU arenas: where slots lie, when they are lent out again, and what foreign memory is offered in place."""

from __future__ import annotations

import itertools

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.memory import OWN_ARENA_BYTES, SHARED_ARENA_BYTES, Arena, InPlace, Pool
from layerzero.ipc.errors import CudaError, InvalidArgument, ProtocolError

MIB = 1 << 20


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(FakeGpu())


@pytest.fixture
def context(driver: FakeDriver) -> Context:
    return Context(driver, UUID)


@pytest.fixture
def pool(context: Context) -> Pool:
    return Pool(context, "c1", itertools.count(1))


@pytest.mark.parametrize("kind", ["plain", "vmm"])
def test_arena_has_a_multiple_of_two_mebibytes(context: Context, kind: str) -> None:
    """Smaller allocations share their page with others, which a handle would show, too."""
    assert Arena(context, "c1", 1, 3 * MIB, kind=kind).nbytes == 4 * MIB


def test_each_way_to_offer_an_arena_has_its_own_generation(context: Context) -> None:
    """A worker that was demoted must not take the old mapping for the new one."""
    arena = Arena(context, "c1", 7, 2 * MIB)
    first, fd = arena.offer("ipc")
    staged, staged_fd = arena.offer("staged")
    assert (first.key, staged.key) == (("c1", 7, 1), ("c1", 7, 2))
    assert (fd, staged_fd is None) == (None, False)
    assert arena.offer("ipc") == (first, None)
    arena.close()


def test_closed_arena_leaves_nothing(driver: FakeDriver, context: Context) -> None:
    """GPU memory, pinned pages and descriptors of a client that runs for weeks."""
    for kind, transport in (("plain", "ipc"), ("vmm", "vmm")):
        arena = Arena(context, "c1", 1, 2 * MIB, kind=kind)
        for one in (transport, "staged", "copied"):
            arena.offer(one)
        arena.close()
    assert (driver.mapped, driver.pinned) == ({}, {})


def test_staged_bytes_are_counted_and_mapped_ones_cost_nothing(context: Context) -> None:
    """The report names every copied byte."""
    arena = Arena(context, "c1", 1, 2 * MIB)
    arena.offer("staged")
    with context:
        assert arena.publish("staged", 256, 1000, 0) == 1000
        assert arena.collect("staged", 256, 1000, 0) == 1000
        assert (arena.publish("ipc", 256, 1000, 0), arena.collect("ipc", 256, 1000, 0)) == (0, 0)
        with pytest.raises(ProtocolError, match="not within"):
            arena.publish("staged", 2 * MIB - 8, 16, 0)
    arena.close()


@pytest.mark.parametrize(("transport", "waits"), [("staged", 0), ("copied", 1)])
def test_memory_that_is_not_pinned_is_read_when_the_stream_got_there(
    driver: FakeDriver, context: Context, transport: str, waits: int
) -> None:
    """The driver reads it when it is called: before the worker has written it, if the CPU did not wait."""
    arena = Arena(context, "c1", 1, 2 * MIB)
    arena.offer(transport)
    with context:
        arena.collect(transport, 0, 8, 5)
    assert driver.calls["synchronize_stream"] == waits
    arena.close()


def test_slots_are_aligned_and_do_not_overlap(pool: Pool) -> None:
    """Kernels that load 16 bytes at a time fault on less."""
    blocks = [pool.take(nbytes, 1) for nbytes in (0, 1, 255, 256, 257, 5000, 70_000)]
    assert all(block.offset % 256 == 0 for block in blocks)
    ends = [block.offset + block.nbytes for block in blocks]
    assert [block.offset for block in blocks[1:]] == ends[:-1]
    assert len({block.arena for block in blocks}) == 1


def test_slot_comes_back_to_its_own_stream_only(pool: Pool) -> None:
    """The old stream may still be reading it: for itself, what it does next comes after that; for another, not."""
    kept, block = pool.take(1000, 1), pool.take(1000, 1)
    address = block.address
    pool.give(block)
    assert pool.take(1000, 2).address != address
    assert pool.take(1000, 1).address == address
    assert kept.address != address


def test_large_block_has_an_arena_of_its_own(pool: Pool) -> None:
    """It can go back to the device alone, and small slots do not pin it."""
    small, large = pool.take(1, 1), pool.take(OWN_ARENA_BYTES, 1)
    assert (small.arena.nbytes, large.arena.nbytes) == (SHARED_ARENA_BYTES, OWN_ARENA_BYTES)
    pool.give(large)
    assert pool.take(OWN_ARENA_BYTES, 1).arena is large.arena
    assert pool.take(OWN_ARENA_BYTES, 1).arena is not large.arena


def test_much_smaller_block_does_not_take_a_large_arena(pool: Pool) -> None:
    """It would hold memory for several of its kind."""
    large = pool.take(4 * OWN_ARENA_BYTES, 1)
    pool.give(large)
    assert pool.take(OWN_ARENA_BYTES, 1).arena is not large.arena


def test_full_arena_is_followed_by_another(pool: Pool) -> None:
    """As many as there is memory for."""
    blocks = [pool.take(8 * MIB, 1) for _ in range(5)]
    assert [block.arena.number for block in blocks] == [1, 1, 1, 1, 2]


def test_address_leads_to_its_arena_while_it_lives(pool: Pool) -> None:
    """What crosses again needs no copy."""
    block = pool.take(1000, 1)
    assert pool.find(block.address + 10, 990) == (block.arena, block.offset + 10)
    assert pool.find(block.arena.address - 1, 1) is None
    assert pool.find(block.arena.address + block.arena.nbytes - 1, 2) is None
    pool.give(block)
    assert pool.trim() == [block.arena]
    assert pool.find(block.address, 10) is None


def test_trim_takes_idle_arenas_only(pool: Pool) -> None:
    """The rest hold results."""
    held, idle = pool.take(1, 1), pool.take(1, 2)
    pool.give(idle)
    assert pool.trim() == [idle.arena]
    assert pool.trim() == []
    pool.give(held)
    assert pool.trim() == [held.arena]


def test_full_device_is_an_error_that_says_so_and_changes_nothing(driver: FakeDriver, pool: Pool) -> None:
    """The caller trims and tries once more."""
    driver.fails["allocate"] = error("cuMemAlloc_v2", 2)
    driver.times["allocate"] = 1
    with pytest.raises(CudaError) as caught:
        pool.take(1, 1)
    assert caught.value.is_out_of_memory
    assert pool.take(1, 1).offset == 0


@pytest.mark.parametrize("nbytes", [-1, 1 << 47])
def test_size_that_cannot_be_is_refused(pool: Pool, nbytes: int) -> None:
    """Before the driver sees it."""
    with pytest.raises(InvalidArgument, match=str(nbytes)):
        pool.take(nbytes, 1)


def test_foreign_memory_is_offered_from_its_base(driver: FakeDriver, context: Context) -> None:
    """A legacy handle opens at the base, wherever the pointer was."""
    in_place = InPlace(context, "c1", itertools.count(5))
    with context:
        base = driver.allocate(20 * MIB)
        found = in_place.find(base + 4096, 100)
        assert not isinstance(found, str)
        arena, offset = found
        assert (arena.address, arena.nbytes, arena.number, offset) == (base, 20 * MIB, 5, 4096)
        assert in_place.find(base, 1) == (arena, 0)  # one arena for one allocation
        arena.close()
    assert base in driver.mapped  # it is its owner's to free


@pytest.mark.parametrize(
    ("fact", "value", "reason"),
    [
        ("legacy", False, "its allocation cannot be shared, as with torch's expandable segments"),
        ("pooled", True, "it comes from a cudaMallocAsync pool"),
        ("managed", True, "it is managed memory"),
        ("ordinal", 1, "it is on another GPU"),
    ],
)
def test_foreign_memory_that_cannot_be_shared_says_why(
    driver: FakeDriver, context: Context, fact: str, value: object, reason: str
) -> None:
    """The report gives the reason of each copy."""
    setattr(driver, fact, value)
    with context:
        assert InPlace(context, "c1", itertools.count()).find(driver.allocate(2 * MIB), 1) == reason


def test_freed_foreign_memory_is_found_out(driver: FakeDriver, context: Context) -> None:
    """The same address is somebody else's then; workers must let go of the old one."""
    in_place = InPlace(context, "c1", itertools.count(1))
    with context:
        base, other = driver.allocate(2 * MIB), driver.allocate(2 * MIB)
        stale, kept = in_place.find(base, 1), in_place.find(other, 1)
        assert not isinstance(stale, str)
        assert in_place.take_stale() == []
        driver.mapped[base] = (driver.gpu.make(2 * MIB), 2 * MIB)  # freed, and the address given out again
        assert in_place.take_stale() == [stale[0]]
        fresh = in_place.find(base, 1)
        assert not isinstance(fresh, str)
        assert fresh[0].number not in (stale[0].number, kept[0].number)
        assert in_place.find(other, 1) == kept
