"""The control socket: one AF_UNIX SOCK_SEQPACKET connection per peer for hello, arenas and file descriptors.

Its end of file is how either side learns of the other's death. Used by client, broker and worker.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar, overload

from layerzero.ipc.errors import OutOfMemory, ProtocolError
from layerzero.ipc.transport import messages, unwanted

MAX_BYTES = 1 << 16
MAX_FDS = 4  # of one message of ours
_SCM_MAX_FD = 253  # of one message of anybody: those that we leave to the kernel are closed while we receive
SUN_PATH_MAX = 107
BACKLOG = 128  # connections that wait to be accepted
_CREDENTIALS = struct.Struct("3i")
M = TypeVar("M", bound=messages.Message)
N = TypeVar("N", bound=messages.Message)


class NoDescriptors(OutOfMemory):
    """This process has no file descriptors left for those that came with a message; the socket is as it was."""


class Closed(Exception):
    """The peer closed the control socket, most likely because it ended."""


def connect(path: Path, *, timeout_s: float) -> socket.socket:
    """Connect to a broker's control socket. Raises TimeoutError, or another OSError when nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        # Python's own timeout makes the socket non-blocking, and then a full backlog is an error instead of a wait.
        seconds, fraction = divmod(timeout_s, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        sock.connect(str(path))
        sock.settimeout(timeout_s)
    except BlockingIOError:
        sock.close()
        raise TimeoutError(f"{path} does not accept connections") from None
    except BaseException:
        sock.close()
        raise
    return sock


def listen(path: Path, *, is_shared: bool = False) -> socket.socket:
    """Bind and listen, owner-only, unless others may connect, who are checked then. The caller holds the broker lock,
    so a socket file in the way is stale."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    previous = os.umask(0o111 if is_shared else 0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(previous)
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Whether something can be read, or a process has ended, within so long. Also of descriptors above 1023, which
    select() cannot take and an application may well have."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0.0) * 1000))


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the peer, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def send(sock: socket.socket, message: messages.Message, fds: tuple[int, ...] = ()) -> None:
    """Send one message with its file descriptors. Raises Closed, or BlockingIOError on a full non-blocking socket."""
    try:
        socket.send_fds(sock, [messages.encode(message)], list(fds), socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError) as exc:
        raise Closed from exc


@overload
def receive(sock: socket.socket) -> tuple[NoReturn, list[int]]: ...
@overload
def receive(sock: socket.socket, one: type[M], /) -> tuple[M, list[int]]: ...
@overload
def receive(sock: socket.socket, one: type[M], other: type[N], /) -> tuple[M | N, list[int]]: ...
@overload
def receive(sock: socket.socket, *expected: type[messages.Message]) -> tuple[messages.Message, list[int]]: ...
def receive(sock: socket.socket, *expected: type[messages.Message]) -> tuple[messages.Message, list[int]]:
    """The next message and the descriptors that came with it, which the caller owns.

    Raises Closed at end of file, ProtocolError for anything that is not one of `expected`, NoDescriptors,
    BlockingIOError when nothing is there on a non-blocking socket, TimeoutError when the socket's timeout is over.
    """
    try:
        data, fds, flags = _receive(sock)
    except ConnectionResetError:  # the peer had not read all of ours; what it had sent before is still there
        try:
            data, fds, flags = _receive(sock)
        except ConnectionResetError as exc:
            raise Closed from exc
    if not data:
        unwanted.close_all(fds)
        raise Closed
    try:
        if flags & socket.MSG_TRUNC or len(fds) > MAX_FDS:
            raise ProtocolError(f"control message is larger than {MAX_BYTES} bytes or carries too many descriptors")
        message = messages.decode(data, *expected)
        if flags & socket.MSG_CTRUNC:
            raise NoDescriptors(f"no file descriptors are left for what came with a message to process {os.getpid()}")
        return message, fds
    except (OutOfMemory, ProtocolError):
        unwanted.close_all(fds)
        raise


def hang_up(sock: socket.socket) -> None:
    """Close the socket of a peer that is not trusted, without waiting for what it sent and nobody has read."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # it can send no more
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # a message of no bytes is no end of file
        is_there = True
        while is_there:
            _, fds, _, is_there = _receive_all(sock)
            unwanted.close_all(fds)
    sock.close()


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    data, fds, flags, _ = _receive_all(sock)
    return data, fds, flags


def _receive_all(sock: socket.socket) -> tuple[bytes, list[int], int, bool]:
    """socket.recv_fds, which in Python 3.11 drops its flags: children would inherit the descriptors. Last: whether
    anything came beside the bytes."""
    fds = array.array("i")
    room = socket.CMSG_SPACE(_SCM_MAX_FD * fds.itemsize) + socket.CMSG_SPACE(_CREDENTIALS.size)
    data, ancillary, flags, _ = sock.recvmsg(MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    return data, list(fds), flags, bool(ancillary)
