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
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.wire import Kind, Ref

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
    fd, doorbell = memory.create_memfd("page", memory.PAGE_BYTES), lane.create_doorbell()
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
