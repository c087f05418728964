"""Who may connect to the broker's ZeroMQ sockets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from layerzero.ipc.transport import sockets


@pytest.mark.parametrize(("uids", "is_heard"), [((), True), ((0, 1), True), ((1, 2), False)])
def test_users_who_may_not_connect_take_no_memory_of_the_broker(
    tmp_path: Path, uids: tuple[int, ...], is_heard: bool
) -> None:
    """A socket that others may open is open to all; what they send must not be read, let alone kept."""
    path = tmp_path / "socket"
    with zmq.Context() as context:
        router = sockets.bind_router(context, path, 4, [os.getuid() + uid for uid in uids])
        assert path.stat().st_mode & 0o777 == (0o666 if uids else 0o600)
        dealer = sockets.connect_dealer(context, f"ipc://{path}", b"L1", 4)
        monitor = dealer.get_monitor_socket(int(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL))
        try:
            dealer.send(b"frame")
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            assert (router in dict(poller.poll(20_000))) == is_heard
        finally:
            for sock in (monitor, dealer, router):
                sock.close(linger=0)
