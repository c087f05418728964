"""broker/io/offers.py: what a client's control message brings is the broker's, or closed."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from tests.fuzz.broker_ends import BrokerEnds, open_descriptors

from layerzero.ipc.shm import lane, memory, ring_words
from layerzero.ipc.transport import control
from layerzero.ipc.transport.messages import AddLane, Hello, Welcome


@pytest.mark.parametrize(("gpu", "nbytes", "bells"), [("", memory.PAGE_BYTES, 2), ("GPU-1", ring_words.PAGE_BYTES, 1)])
def test_a_lane_that_cannot_be_mapped_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, gpu: str, nbytes: int, bells: int
) -> None:
    """A broker that has no more maps must not run out of descriptors, too."""

    def fails(*_: object, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    end = BrokerEnds()
    before = open_descriptors()
    sock = end.connect()
    control.send(sock, Hello(protocols=[1], role="client", package="0", pid=1))
    end.point()
    control.receive(sock, Welcome)
    fds = [memory.create_memfd("page", nbytes), *(lane.create_doorbell() for _ in range(bells))]
    with monkeypatch.context() as patch:
        patch.setattr(memory, "map_fd", fails)
        control.send(sock, AddLane(lane=1, gpu=gpu), tuple(fds))
        end.point()
    for fd in fds:
        os.close(fd)
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    end.point()
    assert open_descriptors() == before
    end.close()
