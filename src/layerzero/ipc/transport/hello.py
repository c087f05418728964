"""The first words of a peer on its control socket: hello, the proof that it knows the stack's secret, welcome."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from layerzero.ipc.errors import BrokerLost, NotAllowed, ProtocolError, from_wire
from layerzero.ipc.transport import control, messages, secret

REDIRECT_TIMEOUT_S = 40.0  # so long a user's own broker may take to start
TRIES = 3  # a user's broker may end while we are on our way to it


def reach(
    path: Path, hello: messages.Hello, key: bytes | None, *, timeout_s: float
) -> tuple[socket.socket, messages.Welcome]:
    """Connect as a client and say hello, to the broker that listens there or to the one that it has for our user.
    Returns our end of the connection.

    Raises what the broker refuses with, NotAllowed when it cannot prove that it knows the secret, control.Closed,
    TimeoutError, or another OSError when nobody listens."""
    for left in reversed(range(TRIES)):
        sock, answer = _reach(path, hello, key, timeout_s)
        if isinstance(answer, messages.Welcome):
            return sock, answer
        sock.close()
        try:
            sock, answer = _reach(Path(answer.path), hello, key, timeout_s)
        except (FileNotFoundError, ConnectionRefusedError, BrokerLost, control.Closed):
            if not left:
                raise
            continue
        if isinstance(answer, messages.Welcome):
            return sock, answer
        sock.close()
        break
    raise ProtocolError("the broker sends us from one broker to the next")


def _reach(
    path: Path, hello: messages.Hello, key: bytes | None, timeout_s: float
) -> tuple[socket.socket, messages.Welcome | messages.Redirect]:
    sock = control.connect(path, timeout_s=timeout_s)
    try:
        answer, fds = _greet(sock, hello, key, REDIRECT_TIMEOUT_S)
        for fd in fds:
            os.close(fd)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(timeout_s)
    return sock, answer


def greet(sock: socket.socket, hello: messages.Hello, key: bytes | None = None) -> tuple[messages.Welcome, list[int]]:
    """Say hello; returns the welcome and the descriptors that came with it, which the caller owns. `key`: the secret.

    Raises what the broker refuses with, NotAllowed when it cannot prove that it knows the secret, control.Closed.
    """
    answer, fds = _greet(sock, hello, key)
    if isinstance(answer, messages.Redirect):
        raise ProtocolError("the broker sends us to another one, which is for clients alone")
    return answer, fds


def _greet(
    sock: socket.socket, hello: messages.Hello, key: bytes | None, patience_s: float | None = None
) -> tuple[messages.Welcome | messages.Redirect, list[int]]:
    """`patience_s`: how long the answer to our proof may take; None: as long as the socket waits anyway."""
    nonce = secret.new_nonce() if key is not None else b""
    control.send(sock, replace(hello, nonce=nonce))
    answer, fds = control.receive(sock, messages.Welcome, messages.Challenge, messages.Refused, messages.Redirect)
    proofs = None
    if isinstance(answer, messages.Challenge):
        if key is None:
            raise NotAllowed("the broker asks for the stack's secret; name its file (LAYERZERO_SECRET_FILE)")
        proofs = secret.Handshake(key, hello.role, nonce, answer.nonce)
        control.send(sock, messages.Proof(mac=proofs.peer_mac))
        if patience_s is not None:
            sock.settimeout(patience_s)
        answer, fds = control.receive(sock, messages.Welcome, messages.Refused, messages.Redirect)
    if isinstance(answer, messages.Refused):
        raise from_wire(answer.error)
    assert isinstance(answer, (messages.Welcome, messages.Redirect))
    if key is not None and (proofs is None or not secret.is_equal(answer.mac, proofs.broker_mac)):
        for fd in fds:
            os.close(fd)
        raise NotAllowed(
            "the broker has not proved that it knows the secret: it runs without --secret-file, or is not the broker "
            "of this stack"
        )
    return answer, fds
