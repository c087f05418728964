"""The first words on a control socket, against a broker that stops in the middle of them."""

from __future__ import annotations

import socket
import threading

import pytest

from layerzero.ipc.transport import control, messages, wire
from layerzero.ipc.transport.hello import greet


def test_a_health_check_does_not_wait_longer_than_it_said() -> None:
    """Only a client that may be sent on to a broker that still starts is more patient."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def challenge() -> None:
        control.receive(theirs, messages.Hello)
        control.send(theirs, messages.Challenge(nonce=bytes(32)))
        control.receive(theirs, messages.Proof)

    broker = threading.Thread(target=challenge)
    broker.start()
    ours.settimeout(2.0)
    hello = messages.Hello(protocols=[wire.PROTOCOL], role="client", package="", pid=1)
    with ours, theirs:
        with pytest.raises(TimeoutError):
            greet(ours, hello, b"k" * 32)
        assert ours.gettimeout() == 2.0
        broker.join()
