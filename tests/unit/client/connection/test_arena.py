"""Arenas: what is kept of freed memory, what goes back to the system, and that memory which went back is asked for
again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from layerzero.client.connection import arena as arenas
from layerzero.client.connection.arena import FIRST_ARENA_BYTES, KEPT_IDLE_BYTES, MAX_IDLE_BYTES, OWN_ARENA_BYTES, Pool
from layerzero.ipc import free_memory
from layerzero.ipc.errors import OutOfMemory
from layerzero.ipc.shm import memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB stand for 256: tests share their machine."""
    monkeypatch.setattr(arenas, "MAX_IDLE_BYTES", 16 * MIB)
    monkeypatch.setattr(arenas, "KEPT_IDLE_BYTES", 8 * MIB)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    for arena in made._arenas:
        os.close(arena.fd)


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def resident_bytes(pool: Pool) -> int:
    """What the kernel holds for the pool's files."""
    return sum(512 * os.fstat(arena.fd).st_blocks for arena in pool._arenas)


def test_bounds_are_those_of_the_documents() -> None:
    """docs/design.md names them."""
    assert (MAX_IDLE_BYTES, KEPT_IDLE_BYTES) == (256 * MIB, 128 * MIB)


@pytest.mark.parametrize(
    "nbytes", [0, 1, FIRST_ARENA_BYTES, FIRST_ARENA_BYTES + 1, OWN_ARENA_BYTES - 1, OWN_ARENA_BYTES]
)
def test_a_programs_first_array_may_be_of_any_size(pool: Pool, nbytes: int) -> None:
    """Those between the first arena's size and that of an arena of one's own raised an AssertionError."""
    view, arena, offset = pool.allocate(nbytes)
    assert view.nbytes == nbytes
    assert offset + nbytes <= arena.nbytes


@pytest.mark.parametrize("nbytes", [MIB, 4 * MIB, 9 * MIB])
def test_freed_memory_goes_back_to_the_system_without_another_call(pool: Pool, nbytes: int) -> None:
    """A server that has served its largest batch may rest for hours."""
    views = [pool.allocate(nbytes)[0] for _ in range(60 * MIB // nbytes)]
    assert resident_bytes(pool) >= 50 * MIB
    views.clear()
    assert resident_bytes(pool) <= 16 * MIB


def test_free_ranges_between_live_slots_go_back_too(pool: Pool) -> None:
    """One result that is kept must not keep the fifteen beside it."""
    views = [pool.allocate(4 * MIB)[0] for _ in range(15)]
    for view in views:
        view[:] = b"\7" * len(view)
    kept = views[::5]
    del views, view
    assert resident_bytes(pool) <= len(kept) * 4 * MIB + 16 * MIB
    assert all(view[0] == view[-1] == 7 for view in kept)


def test_some_freed_memory_is_kept(pool: Pool) -> None:
    """A loop of calls must not ask the kernel for fresh pages at each."""
    view, arena, _ = pool.allocate(MIB)
    del view
    assert 0 < pool.stats()["idle_bytes"] == resident_bytes(pool) == arena.nbytes
    assert pool.allocate(MIB)[1] is arena


def test_memory_that_went_back_is_reserved_again_before_it_is_used(pool: Pool) -> None:
    """A write to a page that the machine has no more would be SIGBUS."""
    views = [pool.allocate(MIB)[0] for _ in range(60)]
    keeps = views[59]  # its arena stays
    arena = next(a for a in pool._arenas if a.live and a.address <= address(keeps) < a.address + a.nbytes)
    del views
    assert arena.hole_bytes
    found = [pool.allocate(MIB) for _ in range(4)]
    for view, owner, offset in found:
        assert all(not (s < offset + MIB and offset < e) for s, e in owner.holes)
        view[:] = b"x" * MIB
    assert pool.stats()["idle_bytes"] == resident_bytes(pool) - pool.stats()["slots"] * MIB


def test_an_arena_that_is_shown_to_a_broker_has_all_its_pages(pool: Pool) -> None:
    """A second session may offer one that has given pages back; brokers refuse those."""
    kept, owner, _ = pool.allocate(64)
    freed = [pool.allocate(MIB)[0] for _ in range(400)]
    del freed
    pool.allocate(64)
    holed = next((one for one in pool._arenas if one.holes), owner)
    pool.refill(holed)
    assert not holed.holes
    memory.check_arena(holed.fd, holed.nbytes)
    assert kept.nbytes == 64


def test_reserving_again_is_out_of_memory_where_the_machine_has_too_little(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is for a new arena; the slot is free then, and memory of others is untouched."""
    views = [pool.allocate(2 * MIB)[0] for _ in range(30)]
    kept = views[::10]
    del views
    slots = pool.stats()["slots"]

    def refuse(nbytes: int) -> None:
        raise OutOfMemory("no", nbytes=nbytes)

    monkeypatch.setattr(free_memory, "check", refuse)
    got = []
    with pytest.raises(OutOfMemory):
        got.extend(pool.allocate(2 * MIB)[0] for _ in range(30))
    assert pool.stats()["slots"] == slots + len(got)
    monkeypatch.undo()
    assert pool.allocate(2 * MIB)[0].nbytes == 2 * MIB
    assert len(kept) == 3


def test_empty_arenas_without_pages_are_closed_by_the_next_call(pool: Pool) -> None:
    """Each is a descriptor here and a map in every worker; but whoever frees may be the garbage collector, which must
    not send messages."""
    told: list[arenas.Arena] = []
    views = []
    for _ in range(6):
        view, arena, _ = pool.allocate(9 * MIB)
        arena.registrations.append(told.append)
        views.append(view)
    del view
    views.clear()
    assert not told
    pool.allocate(64)
    assert len(told) >= 4


def test_slots_too_small_to_go_back_do_not_cost_a_look_at_each_free(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MiB in slots of 4 KiB, every other one live: nothing can go back, and asking each time would cost more than
    the calls."""
    views = [pool.allocate(4096)[0] for _ in range(10240)]
    looks = []
    punch = arenas.Arena.punch

    def look(arena: arenas.Arena) -> int:
        looks.append(arena)
        return punch(arena)

    monkeypatch.setattr(arenas.Arena, "punch", look)
    kept = views[::2]
    del views
    assert len(looks) < 30
    assert len(kept) == 5120


def test_an_empty_arena_takes_slots_of_any_size_again(pool: Pool) -> None:
    """Else a program that goes from many small tensors to fewer large ones would hold memory for both."""
    views = [pool.allocate(MIB)[0] for _ in range(FIRST_ARENA_BYTES // MIB)]
    views.clear()
    larger = [pool.allocate(FIRST_ARENA_BYTES // 2)[0] for _ in range(2)]
    assert pool.stats()["arenas"] == 1
    assert len({address(view) for view in larger}) == 2


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns; the child calls nothing of it
def test_a_forked_child_gives_back_nothing_of_its_parents(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies of views die in the child; the pages are still the parent's."""
    monkeypatch.setattr(arenas, "pool", pool)
    views = [pool.allocate(9 * MIB)[0] for _ in range(4)]
    for view in views:
        view[:] = b"\7" * len(view)
    child = os.fork()
    if child == 0:
        del view
        views.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(view[0] == view[-1] == 7 for view in views)
    assert resident_bytes(pool) >= 36 * MIB
    del view
    views.clear()
    assert resident_bytes(pool) <= 16 * MIB  # the parent itself still does


def test_guarded_slots_end_where_their_arena_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in an arena of its own, which the next one of its size has; more than there may be lie side by side."""
    monkeypatch.setattr(arenas, "MAX_GUARDED", 3)
    monkeypatch.setenv("LAYERZERO_DEBUG", "1")
    pool = arenas.Pool()
    monkeypatch.setattr(pool, "band_bytes", arenas.BAND_BYTES)
    held = [pool.allocate(nbytes) for nbytes in (28, 64, 5000)]
    assert len({id(arena) for _, arena, _ in held}) == 3
    for view, arena, begin in held:
        assert begin % 64 == 0
        assert 0 <= arena.nbytes - begin - view.nbytes < 64
    _, beside, begin = pool.allocate(28)
    assert beside.nbytes - begin > 4096
    assert pool.overruns() == []
    held[0][1].view[held[0][2] + 28] = 0
    assert pool.overruns() == ["behind the end of an array of 28 bytes"]
    first = held.pop(0)[1]
    again = pool.allocate(30)[1]
    assert again is first
    del again, first
    assert pool.allocate(20_000)[1].nbytes >= 20_000 + arenas.BAND_BYTES
    assert len(pool._guarded) == 3
