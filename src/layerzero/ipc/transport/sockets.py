"""ZeroMQ sockets with our limits, and the two readings that an event loop of its own needs."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import cast

import zmq

from layerzero.ipc.transport import wire

REMOTE_HWM = 64  # frames per peer and direction
REMOTE_HEARTBEAT_MS = 5000  # a peer behind a cut line is let go
HANDSHAKE_MS = 5000  # one that connects and says nothing is hung up on: it holds a descriptor
BACKLOG = 16  # connections that wait to be accepted, also when a listener was closed a moment ago
REMOTE_HANDSHAKE_MS = 3000  # one that does not show its key by then is hung up on
_SO_PASSRIGHTS = 83
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # the enums cost a microsecond a use


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes, hwm: int
) -> zmq.Socket[bytes]:
    """A client's or worker's end. `hwm`: messages queued per direction before sending fails."""
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.ROUTING_ID, identity)
    _limit(sock, hwm)
    sock.connect(endpoint)
    return sock


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], path: Path, hwm: int, uids: Collection[int] = ()
) -> zmq.Socket[bytes]:
    """The broker's end. `uids`: the users who may connect; without any it is owner-only. Who has no identity of ours is
    not heard. A message to a peer that is gone is an error, never dropped in silence."""
    sock = context.socket(zmq.ROUTER)
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    _limit(sock, hwm)
    for uid in uids:  # others are hung up on before anything of theirs is read, and takes memory
        sock.setsockopt(zmq.IPC_FILTER_UID, uid)
    bind_path(sock, path, is_shared=bool(uids))
    return sock


def bind_path(sock: zmq.Socket[bytes], path: Path, *, is_shared: bool) -> None:
    """Listen there, owner-only unless others may connect; the caller takes the path away at the end. Raises ZMQError.

    libzmq reads no descriptors: it would close in its thread what comes with bytes, and that close may wait. So the
    listener is ours, and takes none, from Linux 6.16 on."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    previous = os.umask(0o111 if is_shared else 0o177)
    try:
        with suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        sock.setsockopt(zmq.USE_FD, listener.fileno())
        sock.bind(f"ipc://{path}")
        listener.detach()
    except OSError as exc:
        raise zmq.ZMQError(exc.errno) from exc
    finally:
        sock.setsockopt(zmq.USE_FD, -1)
        os.umask(previous)
        listener.close()


def bind_remote(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, secret: bytes) -> zmq.Socket[bytes]:
    """The broker's end on tcp: encrypted, for those whose keys its ZAP handler accepts. Raises ZMQError."""
    sock = context.socket(zmq.ROUTER)
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
    sock.setsockopt(zmq.ZAP_DOMAIN, b"layerzero")
    sock.setsockopt(zmq.HEARTBEAT_IVL, REMOTE_HEARTBEAT_MS)
    sock.setsockopt(zmq.HANDSHAKE_IVL, REMOTE_HANDSHAKE_MS)
    sock.setsockopt(zmq.BACKLOG, BACKLOG)
    _limit(sock, REMOTE_HWM)
    try:
        sock.bind(endpoint)
    except zmq.ZMQError:
        sock.close(linger=0)
        raise
    return sock


def connect_remote(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, public: bytes, secret: bytes, broker: bytes
) -> zmq.Socket[bytes]:
    """The other end. `broker`: the public key that it must have."""
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.CURVE_SERVERKEY, broker)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
    _limit(sock, REMOTE_HWM)
    sock.connect(endpoint)
    return sock


def _limit(sock: zmq.Socket[bytes], hwm: int) -> None:
    sock.setsockopt(zmq.SNDHWM, hwm)
    sock.setsockopt(zmq.RCVHWM, hwm)
    sock.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.LINGER, 500)


def read_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """What a socket's monitor says next: the event and its value, for a connection its descriptor. zmq.utils.monitor
    does that, too, and loads asyncio."""
    said = monitor.recv_multipart()[0]
    return int.from_bytes(said[:2], sys.byteorder), int.from_bytes(said[2:6], sys.byteorder, signed=True)


def poll_fd(sock: zmq.Socket[bytes]) -> int:
    """Readable when the socket's state may have changed. Edge-triggered: ask `has_input` before waiting on it."""
    return cast(int, sock.getsockopt(zmq.FD))


def has_input(sock: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, sock.get(_EVENTS)) & _POLLIN)
