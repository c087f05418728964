"""Control connections of clients and workers: who they are, and whether the broker speaks with them."""

from __future__ import annotations

import secrets
import socket
import traceback
from collections import deque
from dataclasses import dataclass, field

from layerzero.ipc.errors import LayerZeroError, ProtocolError, VersionMismatch
from layerzero.ipc.logs import log
from layerzero.ipc.transport import control, messages, unwanted, wire
from layerzero.ipc.transport.secret import Handshake
from layerzero.ipc.wording import shortened

HELLO_TIMEOUT_S = 5.0
MAX_FRAMES = 12  # of a traceback, the innermost ones


@dataclass(eq=False)
class Peer:
    """`role` is "" until the hello; "redirected" for one that waits for its user's broker."""

    sock: socket.socket
    role: str = ""
    identity: bytes = b""
    number: int = 0
    pid: int = 0
    uid: int = -1
    backend: str = ""
    generation: int = 0
    since_s: float = 0.0
    hello: messages.Hello | None = None  # of one that has yet to prove that it knows the secret
    proofs: Handshake | None = None
    backlog: deque[tuple[messages.Message, tuple[int, ...]]] = field(default_factory=deque)  # for a busy worker
    last_arena: int = -1  # numbers only grow: a worker may still map a retired one when its number comes again

    def drop_backlog(self) -> None:
        while self.backlog:
            unwanted.close_all(self.backlog.popleft()[1])

    @property
    def is_closed(self) -> bool:
        return self.sock.fileno() < 0

    def close(self) -> None:
        self.drop_backlog()
        control.hang_up(self.sock)


def new_identity() -> bytes:
    """A routing id nobody can guess. ZeroMQ reserves ids that begin with a zero byte."""
    return b"L" + secrets.token_bytes(16)


def check_version(hello: messages.Hello, package: str) -> None:
    """Refuse other protocol versions. Raises VersionMismatch."""
    if wire.PROTOCOL not in hello.protocols:
        of = f" (layerzero-broker {hello.package})" if hello.package else ""  # an agent has no package
        raise VersionMismatch(
            f"this broker (layerzero-broker {package}) speaks protocol {wire.PROTOCOL}; the {hello.role}{of} "
            f"speaks {', '.join(map(str, hello.protocols))}. "
            "Restart the older side: lz down, then connect again",
            broker_protocol=wire.PROTOCOL,
            peer_protocols=hello.protocols,
            command="lz down",
        )


def refuse(peer: Peer, error: LayerZeroError) -> None:
    """Say why; the caller closes the connection."""
    try:
        control.send(peer.sock, messages.Refused(error=error.to_wire()))
    except (control.Closed, OSError):
        return  # it is gone already, which is what we want


def note_failure(exc: Exception, role: str, number: int | str) -> ProtocolError:
    """Log what handling a peer's message raised, which nobody had thought of; returns what the peer is cut off with."""
    text = f"the broker failed on a message: {type(exc).__name__}: {exc}"
    trace = "".join(traceback.format_exception(exc, limit=-MAX_FRAMES))
    log("message.failed", role=role, peer=number, error=text, traceback=trace)
    return ProtocolError(shortened(text))
