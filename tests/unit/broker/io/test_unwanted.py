"""Descriptors that nobody asked for: whoever closes the last one may wait as long as its sender chose."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from tests.fuzz.broker_ends import BrokerEnds

from layerzero.ipc.transport import control, sockets, wire
from layerzero.ipc.transport.messages import AddArena, AddLane, Hello, Message, RetireArena, Welcome

LINGER_S = 30
SOON_S = 10.0


@pytest.fixture
def reader() -> Iterator[socket.socket]:
    """A listener whose connections nobody reads."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    yield listener
    listener.close()


def lingering(reader: socket.socket) -> socket.socket:
    """Its last close waits for LINGER_S."""
    sock = socket.create_connection(reader.getsockname())
    sock.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sock.send(bytes(1 << 16))
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    return sock


def nested(reader: socket.socket) -> socket.socket:
    """One with such a socket in its queue."""
    outer, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with outer, lingering(reader) as held:
        socket.send_fds(outer, [b"x"], [held.fileno()])
    return inner


def client(end: BrokerEnds) -> socket.socket:
    sock = end.connect()
    control.send(sock, Hello(protocols=[wire.PROTOCOL], role="client", package="0", pid=1))
    end.point()
    control.receive(sock, Welcome)
    return sock


@pytest.mark.parametrize("kind", [lingering, nested])
@pytest.mark.parametrize(
    ("message", "count"),
    [
        (AddArena(arena=1, nbytes=64), 1),
        (AddLane(lane=1), 1),
        (AddLane(lane=1), 3),
        (RetireArena(arena=1), 1),
        (Hello(protocols=[wire.PROTOCOL], role="client", package="0", pid=1), 5),
        (None, 253),
    ],
)
def test_what_a_client_sends_along_holds_nobody_up(
    reader: socket.socket, message: Message | None, count: int, kind: object
) -> None:
    """The broker once waited for the end of a linger that a client had chosen, with all that it serves."""
    end = BrokerEnds()
    sock = client(end)
    with kind(reader) as held:  # type: ignore[operator]
        if message is None:
            socket.send_fds(sock, [b"\xc1"], [held.fileno()] * count)
        else:
            control.send(sock, message, (held.fileno(),) * count)
    since_s = time.monotonic()
    end.point()
    end.close()
    assert time.monotonic() - since_s < SOON_S
    sock.close()


@pytest.mark.parametrize("kind", [lingering, nested])
def test_what_nobody_has_read_goes_with_the_connection(reader: socket.socket, kind: object) -> None:
    """Not in the loop's time; behind messages of no bytes, too."""
    end = BrokerEnds()
    sock = client(end)
    for data in (b"\xc1", b"", b"", b"\xc1"):
        if not data:
            sock.send(data)
            continue
        with kind(reader) as held:  # type: ignore[operator]
            socket.send_fds(sock, [data], [held.fileno()])
    since_s = time.monotonic()
    end.point()
    end.close()
    assert time.monotonic() - since_s < SOON_S
    sock.close()


def test_connections_that_nobody_has_accepted_go_with_the_listener(reader: socket.socket) -> None:
    """A broker that ends waits for none of them."""
    end = BrokerEnds()
    sock = end.dial()
    with lingering(reader) as held:
        socket.send_fds(sock, [b"x"], [held.fileno()])
    since_s = time.monotonic()
    end.close()
    assert time.monotonic() - since_s < SOON_S
    sock.close()


def test_zeromq_takes_no_descriptors(tmp_path: Path, reader: socket.socket) -> None:
    """libzmq would close them in the thread that all frames pass."""
    context = zmq.Context()
    router = sockets.bind_router(context, tmp_path / "router", 8)
    with socket.socket(socket.AF_UNIX) as sock, lingering(reader) as held:
        sock.connect(str(tmp_path / "router"))
        try:
            socket.send_fds(sock, [b"x"], [held.fileno()])
        except OSError as exc:
            refusal = exc.errno
        else:
            refusal = 0
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    router.close(linger=0)
    context.term()
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (6, 16):
        pytest.skip("Linux refuses descriptors for a socket from 6.16 on")
    assert refusal == errno.EPERM
