"""workers/loop.py: what a worker refuses, and what it lets go of. A worker process, with the test for its broker."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gpu.bare_worker import NBYTES, PLANS, Worker
from tests.gpu.peer import PATIENCE_S

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.transport import chains, messages, wire
from layerzero.ipc.transport.wire import Kind, Ref
from layerzero.workers import serving

ARENA_BYTES = 4 * NBYTES
TOY = """
from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Loaded

def copy(call, inputs, outputs):
    def bound():
        outputs[0].memory[:] = inputs[0].memory
    return bound

def refuse(call, inputs, outputs):
    def bound():
        raise InvalidArgument("no" * 5000)
    return bound

def load():
    return Loaded({"toy": "1"}, {"toy.copy": copy, "toy.raise": refuse, "toy.illegal": copy, "toy.synchronize": copy})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """With arenas 1 and 2 of client 1."""
    (tmp_path / "toy.py").write_text(TOY)
    worker = Worker(tmp_path, "", provider=tmp_path / "toy.py")
    for arena in (1, 2):
        fd = memory.create_memfd(f"arena-{arena}", ARENA_BYTES)
        worker.tell(messages.MapArena(client=1, arena=arena, nbytes=ARENA_BYTES), fd)
        os.close(fd)
    yield worker
    worker.close()


def refs(arena: int = 1, *, offset: int = 0, nbytes: int = NBYTES) -> bytes:
    """One block from `offset` on, read and written."""
    return wire.pack_refs([Ref(arena, 0, offset, nbytes)] * 2)


def run(worker: Worker, references: bytes, kernel: str = "copy") -> None:
    worker.send(wire.pack(Kind.RUN, route=PLANS[kernel], seq=1, attempt=1, aux=1, body=references))


def ran(worker: Worker, references: bytes) -> bool:
    run(worker, references)
    return worker.answer()[0].kind == Kind.RAN


@pytest.mark.parametrize(
    ("references", "words"),
    [
        (refs(offset=ARENA_BYTES - NBYTES // 2), "outside an arena"),
        (refs(offset=(1 << 64) - NBYTES), "outside an arena"),
        (refs(nbytes=NBYTES - 1), "the reference has 65535"),
        (refs(nbytes=0), "the reference has 0"),
    ],
    ids=["beyond", "far beyond", "a byte short", "empty"],
)
def test_references_that_do_not_hold_their_tensor_never_reach_a_kernel(
    worker: Worker, references: bytes, words: str
) -> None:
    """A library takes an address and its own idea of a size: what lies behind is somebody else's."""
    run(worker, references)
    error = worker.error()
    assert isinstance(error, ProtocolError)
    assert words in error.message
    assert ran(worker, refs(offset=ARENA_BYTES - NBYTES))


def test_an_error_of_any_length_travels_in_short(worker: Worker) -> None:
    """The broker keeps it, and shows it to whoever asks."""
    run(worker, refs(), "raise")
    assert worker.error().message == "no" * 1000


def ride(worker: Worker, references: bytes) -> None:
    """The same call on an express lane."""
    fd, doorbell = memory.create_memfd("page", lane.PAGE_BYTES), lane.create_doorbell(counts=True)
    ringing, hearing = lane.create_answer_bell()
    page, poll = lane.Page(fd), select.poll()
    poll.register(hearing, select.POLLIN)
    worker.tell(messages.MapLane(client=1, lane=1, gpu=""), fd, doorbell, ringing.fileno())
    worker.allow(1)
    assert ran(worker, refs(2))  # ALLOW came before
    page.put_call(1, PLANS["copy"], references)
    lane.ring(doorbell)
    assert poll.poll(PATIENCE_S * 1e3)
    answer = page.get_end(1)
    assert answer is not None
    assert answer[0] == lane.OK
    page.close()
    for end in (ringing, hearing):
        end.close()
    for descriptor in (fd, doorbell):
        os.close(descriptor)


class Rider:
    """A client's end of a lane: puts one call after the other there."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.calls = worker, 0
        self.fd, self.doorbell = memory.create_memfd("page", lane.PAGE_BYTES), lane.create_doorbell(counts=True)
        self.ringing, self.hearing = lane.create_answer_bell()
        self.page = lane.Page(self.fd)
        worker.tell(messages.MapLane(client=1, lane=1, gpu=""), self.fd, self.doorbell, self.ringing.fileno())
        for kernel in ("copy", "raise"):
            worker.allow(1, kernel)
        self.table_fd = memory.create_memfd("tables", ARENA_BYTES)
        worker.tell(messages.MapArena(client=1, arena=7, nbytes=ARENA_BYTES), self.table_fd)
        assert ran(worker, refs(7))  # what was told came before

    def put(self, plan: int, body: bytes) -> tuple[int, int, bytes]:
        self.calls += 1
        self.page.put_call(self.calls, plan, body)
        lane.ring(self.doorbell)
        poll = select.poll()
        poll.register(self.hearing, select.POLLIN)
        while (end := self.page.get_end(self.calls)) is None:
            assert poll.poll(PATIENCE_S * 1e3)
            lane.hear(self.hearing)
        return end

    def put_chain(
        self, steps: list[chains.ChainStep], *variables: Ref, table: bytes | None = None, digest: bytes | None = None
    ) -> tuple[int, int, bytes]:
        table = chains.pack_table(steps) if table is None else table
        os.pwrite(self.table_fd, table, 128)
        where = Ref(7, 0, 128, len(table))
        body = chains.pack_chain_call(where, chains.digest_of(table) if digest is None else digest, variables)
        return self.put(chains.CHAIN, body)

    def close(self) -> None:
        self.page.close()
        for end in (self.ringing, self.hearing):
            end.close()
        for descriptor in (self.fd, self.doorbell, self.table_fd):
            os.close(descriptor)


@pytest.fixture
def rider(worker: Worker) -> Iterator[Rider]:
    made = Rider(worker)
    yield made
    made.close()


def step(*references: Ref, kernel: str = "copy", values: bytes = b"") -> chains.ChainStep:
    return chains.ChainStep(PLANS[kernel], references, values)


WHOLE = Ref(1, 0, 0, NBYTES), Ref(2, 0, 0, NBYTES)


def test_a_chain_runs_its_steps_in_order_and_tells_their_times(rider: Rider) -> None:
    """Each step is the call that it would be by itself; variables are where the call says."""
    at = Ref(0, 1, 0, NBYTES), Ref(0, 2, 64, NBYTES)
    places = Ref(1, 0, NBYTES, NBYTES), Ref(2, 0, 0, NBYTES + 64)
    for _ in range(3):
        status, elapsed_ns, said = rider.put_chain([step(*WHOLE), step(*at), step(*WHOLE)], *places)
        assert status == lane.OK
        times = chains.unpack_times(said)
        assert len(times) == 3
        assert sum(times) == elapsed_ns
        assert rider.page.step_of(rider.calls) == (2, True)
    assert rider.page.step_of(rider.calls + 1) == (0, False)


def _tables() -> dict[str, tuple[bytes, bytes | None]]:
    good = chains.pack_table([step(*WHOLE)])
    return {
        "cut": (good[:-1], None),
        "cut in a step": (good + good[:9], None),
        "another digest": (good, b"0" * 16),
        "empty": (b"", None),
        "too many steps": (chains.pack_table([step(*WHOLE)] * (chains.MAX_STEPS + 1)), None),
    }


@pytest.mark.parametrize("name", _tables())
def test_a_table_that_is_none_runs_nothing(rider: Rider, name: str) -> None:
    """It lies in memory that the client writes to as it likes."""
    table, digest = _tables()[name]
    assert rider.put_chain([], table=table, digest=digest)[0] == lane.DECLINED
    assert rider.put_chain([step(*WHOLE)])[0] == lane.OK


@pytest.mark.parametrize(
    "wrong",
    [
        step(Ref(1, 0, ARENA_BYTES - 8, NBYTES), WHOLE[1]),
        step(Ref(9, 0, 0, NBYTES), WHOLE[1]),
        step(Ref(0, 1, 8, NBYTES), WHOLE[1]),
        step(Ref(0, 2, 0, NBYTES), WHOLE[1]),
        step(Ref(0, 1, (1 << 64) - 8, NBYTES), WHOLE[1]),
        step(WHOLE[0]),
        step(*WHOLE, values=b"12345678"),
        chains.ChainStep(12345, WHOLE),
    ],
    ids=["beyond", "no arena", "behind", "no variable", "far", "too few", "no neighbour", "no plan"],
)
def test_a_chain_with_a_step_that_may_not_run_runs_none(rider: Rider, wrong: chains.ChainStep) -> None:
    """Before anything is written, so that the client may go on from the first step."""
    variable = Ref(1, 0, 0, NBYTES)
    assert rider.put_chain([step(*WHOLE), wrong], variable)[0] == lane.DECLINED
    assert rider.page.step_of(rider.calls) != (1, True)
    assert rider.put_chain([step(*WHOLE)] * 2, variable)[0] == lane.OK


@pytest.mark.parametrize("body", [b"", b"x" * 16, b"x" * 41, bytes(24 + 16 + 23)])
def test_a_chains_call_that_is_none_runs_nothing(rider: Rider, body: bytes) -> None:
    """Whatever lies on the page."""
    assert rider.put(chains.CHAIN, body)[0] == lane.DECLINED


def test_a_table_outside_of_an_arena_is_not_read(rider: Rider) -> None:
    """Its reference is the client's word."""
    for where in (Ref(7, 0, ARENA_BYTES - 8, 64), Ref(8, 0, 0, 64), Ref(7, 0, 0, chains.MAX_TABLE_BYTES + 1)):
        assert rider.put(chains.CHAIN, chains.pack_chain_call(where, bytes(16)))[0] == lane.DECLINED


def test_a_step_that_raises_is_named_and_ends_its_chain(rider: Rider) -> None:
    """Those before it have ended, those behind it were not begun."""
    status, _, said = rider.put_chain([step(*WHOLE), step(*WHOLE, kernel="raise"), step(*WHOLE)])
    assert status == lane.RAISED
    assert b"nono" in said
    assert rider.page.step_of(rider.calls) == (1, True)


@pytest.mark.parametrize("variable", ["LAYERZERO_NO_C", "LAYERZERO_WORKER_OTHER"])
def test_calls_end_alike_with_what_is_compiled_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Where it cannot be loaded, as in an image with another libc, the same steps run in Python."""
    monkeypatch.setenv(variable, "1")
    (tmp_path / "toy.py").write_text(TOY)
    worker = Worker(tmp_path, "", provider=tmp_path / "toy.py")
    for arena in (1, 2):
        fd = memory.create_memfd(f"arena-{arena}", ARENA_BYTES)
        worker.tell(messages.MapArena(client=1, arena=arena, nbytes=ARENA_BYTES), fd)
        os.close(fd)
    rider = Rider(worker)
    assert ("_serving" in Path(f"/proc/{worker.process.pid}/maps").read_text()) == (
        serving.library is not None and variable != "LAYERZERO_NO_C"
    )
    for _ in range(2):  # of the second one it is known that it is allowed and whole
        assert rider.put(PLANS["copy"], refs())[0] == lane.OK
        status, _, said = rider.put(PLANS["raise"], refs())
        assert status == lane.RAISED
        assert b"nono" in said
        assert rider.put(PLANS["copy"] + 1000, refs())[0] == lane.DECLINED
        assert rider.put_chain([step(*WHOLE)] * 2)[0] == lane.OK
    assert ran(worker, refs())
    rider.close()
    worker.close()


@pytest.mark.parametrize("path", ["broker", "express"])
def test_memory_that_a_client_gave_up_is_unmapped(worker: Worker, path: str) -> None:
    """What is remembered of calls on it would keep it: the machine would run out of memory that nobody has."""
    maps = Path(f"/proc/{worker.process.pid}/maps")
    assert ran(worker, refs(1))
    if path == "express":
        ride(worker, refs(1))
    assert "memfd:arena-1" in maps.read_text()
    worker.tell(messages.UnmapArena(client=1, arena=1))
    fd = memory.create_memfd("arena-3", ARENA_BYTES)
    worker.tell(messages.MapArena(client=1, arena=3, nbytes=ARENA_BYTES), fd)
    os.close(fd)
    assert ran(worker, refs(3))  # so that it has read what came before
    assert "memfd:arena-1" not in maps.read_text()


def test_a_kernel_of_the_cpu_cannot_be_lifted(worker: Worker) -> None:
    """The broker does not ask; the worker serves on."""
    answer = worker.lift(PLANS["copy"], (64, 64))
    assert answer.reason == "NO_CUPTI"
    run(worker, refs())
    assert worker.answer()[0].kind == Kind.RAN


def test_a_worker_that_finds_no_cupti_starts_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to watch machine code, and loads nothing of CUDA for that."""
    monkeypatch.setenv("LAYERZERO_CUPTI", str(tmp_path / "none.so"))
    (tmp_path / "toy.py").write_text(TOY)
    worker = Worker(tmp_path, "", provider=tmp_path / "toy.py", lifts=True)
    try:
        maps = Path(f"/proc/{worker.process.pid}/maps").read_text()
        assert "libcuda" not in maps
        assert worker.lift(PLANS["copy"], (64, 64)).reason == "NO_CUPTI"
    finally:
        worker.close()
