"""The control sockets: hello and what follows it, with descriptors of any sort. Whoever talks nonsense is cut off, a
worker that does is killed, and no descriptor is left open when the peer has gone."""

from __future__ import annotations

import fcntl
import os
import random
import socket
from collections.abc import Callable

from tests.fuzz import values
from tests.fuzz.broker_ends import JOINED, TICKET, BrokerEnds, open_descriptors
from tests.fuzz.source import Source, chunk
from tests.simulation import GPU

from layerzero.ipc.cuda.handles import ArenaHandle
from layerzero.ipc.cuda.offer import PATTERN_BYTES
from layerzero.ipc.shm import lane, memory, ring_words, timeline_words
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.messages import (
    AddArena,
    AddGpu,
    AddGpuArena,
    AddLane,
    Hello,
    Pong,
    Probed,
    RetireArena,
    WorkerEnded,
    encode,
)

TYPED = ()
_MAX_PACKETS = 12


def _sealed(nbytes: int) -> Callable[[], int]:
    return lambda: memory.create_memfd("fuzz", nbytes)


def _unsealed() -> int:
    return os.memfd_create("fuzz", os.MFD_CLOEXEC)


def _half_sealed() -> int:
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


_MAKE: tuple[Callable[[], int], ...] = (
    _sealed(128),
    _sealed(4096),
    _sealed(memory.PAGE_BYTES),
    _sealed(timeline_words.PAGE_BYTES),
    _sealed(ring_words.PAGE_BYTES),
    lane.create_doorbell,
    lambda: os.eventfd(0, os.EFD_CLOEXEC),
    lambda: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC),
    lambda: os.open("/", os.O_RDONLY | os.O_CLOEXEC),
    _unsealed,
    _half_sealed,
)


def run(data: bytes) -> None:
    source = Source(data)
    end = BrokerEnds()
    try:
        before = open_descriptors()
        _talk(end, source)
        end.point()
        end.point()
        assert not end.connections.clients
        assert open_descriptors() == before, "descriptors were left open"
    finally:
        end.close()


def _talk(end: BrokerEnds, source: Source) -> None:
    sock = end.connect()
    sock.settimeout(0)
    try:
        for _ in range(_MAX_PACKETS):
            if not source:
                return
            kinds = source.take(source.number(1) % 7)
            fds = [_MAKE[kind % len(_MAKE)]() for kind in kinds]
            try:
                socket.send_fds(sock, [source.chunk()], fds)
            except (BrokenPipeError, ConnectionResetError, BlockingIOError):
                return
            finally:
                for fd in fds:
                    os.close(fd)
            end.point()
    finally:
        sock.close()


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    """One of the packets, as a value."""
    source, packets = Source(data), []
    while source and len(packets) < _MAX_PACKETS:
        packets.append((source.take(source.number(1) % 7), source.chunk()))
    if not packets:
        return None
    at = rng.randrange(len(packets))
    fds, body = packets[at]
    changed = values.mutated(body, rng)
    if changed is None:
        return None
    packets[at] = (fds, changed)
    if rng.random() < 0.3:
        packets[at] = (bytes(rng.randrange(len(_MAKE)) for _ in range(rng.randrange(5))), body)
    return _script(*packets)


def _script(*packets: tuple[bytes, bytes]) -> bytes:
    return b"".join(bytes([len(fds)]) + fds + chunk(body) for fds, body in packets)


def seeds() -> dict[str, bytes]:
    client = (b"", encode(Hello(protocols=[1], role="client", package="0", pid=1)))
    worker = (b"", encode(Hello(protocols=[1], role="worker", package="0", pid=1, ticket=TICKET)))
    handle = ArenaHandle(GPU, "client", 1, 1, "copied", 4096).to_wire()
    offer = {
        "handle": ArenaHandle(GPU, "client", 0, 1, "copied", 4096).to_wire(),
        "pattern": bytes(PATTERN_BYTES),
        "pid": 7,
    }
    ipc = {"handle": ArenaHandle(GPU, "client", 0, 1, "ipc", 1 << 21, bytes(64)).to_wire()}
    arena = (b"\x01", encode(AddArena(arena=1, nbytes=4096)))
    gpu = (b"\x03\x01", encode(AddGpu(gpu=GPU, has_memops=False, offer=offer)))
    agent = (b"", encode(Hello(protocols=[1], role="agent", package="0", pid=1, backend=JOINED, env="e1")))
    probed = (b"\x02", encode(Probed(code=0, is_late=False, seconds=1.0, stderr_tail="x")))
    return {
        "agent": _script(
            agent,
            (b"", encode(Pong(number=0))),
            probed,
            (b"", encode(WorkerEnded(generation=1, code=1, stderr_tail="x"))),
        ),
        "agent_of_nothing": _script((b"", encode(Hello(protocols=[1], role="agent", package="0", pid=1, backend="x")))),
        "arena": _script(client, arena, (b"", encode(RetireArena(arena=1)))),
        "lane": _script(client, (b"\x02", encode(AddLane(lane=1)))),
        "ring": _script(client, (b"\x04", encode(AddLane(lane=1, gpu=GPU)))),
        "gpu": _script(client, gpu, gpu, (b"\x01", encode(AddGpuArena(arena=1, handle=handle)))),
        "gpu_ipc": _script(client, (b"\x03", encode(AddGpu(gpu=GPU, has_memops=True, offer={**offer, **ipc})))),
        "worker": _script(worker, arena),
        "too_many": _script(client, (b"\x01\x01\x01\x01\x01\x01", encode(AddArena(arena=1, nbytes=4096)))),
        "ticket": _script((b"", encode(Hello(protocols=[1], role="worker", package="0", pid=1, ticket=b"x")))),
        "version": _script((b"\x01", encode(Hello(protocols=[99], role="client", package="0", pid=1)))),
        "stranger": _script((b"\x05", encode(messages.RetireArena(arena=1)))),
    }
