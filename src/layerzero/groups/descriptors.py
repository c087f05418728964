"""Descriptors that come along with a message."""

from __future__ import annotations

import array
import socket


def receive(sock: socket.socket, nbytes: int, most: int = 1) -> tuple[bytes, list[int]]:
    """As socket.recv_fds, whose descriptors children would inherit. The kernel closes those beyond `most`."""
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(nbytes, socket.CMSG_SPACE(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    return data, list(fds)
