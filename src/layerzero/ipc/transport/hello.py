"""The first words of a peer on its control socket: hello, the proof that it knows the stack's secret, welcome."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from layerzero.ipc.errors import NotAllowed, from_wire
from layerzero.ipc.transport import control, messages, secret


def greet(sock: socket.socket, hello: messages.Hello, key: bytes | None = None) -> tuple[messages.Welcome, list[int]]:
    """Say hello; returns the welcome and the descriptors that came with it, which the caller owns. `key`: the secret.

    Raises what the broker refuses with, NotAllowed when it cannot prove that it knows the secret, control.Closed.
    """
    nonce = secret.new_nonce() if key is not None else b""
    control.send(sock, replace(hello, nonce=nonce))
    answer, fds = control.receive(sock, messages.Welcome, messages.Challenge, messages.Refused)
    proofs = None
    if isinstance(answer, messages.Challenge):
        if key is None:
            raise NotAllowed("the broker asks for the stack's secret; name its file (LAYERZERO_SECRET_FILE)")
        proofs = secret.Handshake(key, hello.role, nonce, answer.nonce)
        control.send(sock, messages.Proof(mac=proofs.peer_mac))
        answer, fds = control.receive(sock, messages.Welcome, messages.Refused)
    if isinstance(answer, messages.Refused):
        raise from_wire(answer.error)
    assert isinstance(answer, messages.Welcome)
    if key is not None and (proofs is None or not secret.is_equal(answer.mac, proofs.broker_mac)):
        for fd in fds:
            os.close(fd)
        raise NotAllowed(
            "the broker has not proved that it knows the secret: it runs without --secret-file, or is not the broker "
            "of this stack"
        )
    return answer, fds
