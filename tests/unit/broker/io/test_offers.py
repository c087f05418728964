"""broker/io/offers.py: what a client's control message brings is the broker's, or closed."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from tests.fuzz.broker_ends import BrokerEnds, open_descriptors

from layerzero.ipc.shm import lane, memory, ring_words
from layerzero.ipc.transport import control, wire
from layerzero.ipc.transport.messages import AddLane, Hello, LaneAdded, Welcome


@pytest.mark.parametrize("lacking", ["map_fd", "create_doorbell", "create_answer_bell"])
@pytest.mark.parametrize(("gpu", "nbytes"), [("", lane.PAGE_BYTES), ("GPU-1", ring_words.PAGE_BYTES)])
def test_a_lane_that_cannot_be_opened_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, gpu: str, nbytes: int, lacking: str
) -> None:
    """A broker that has no more maps must not run out of descriptors, too. Its client goes on without the lane."""

    def fails(*_: object, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    end = BrokerEnds()
    before = open_descriptors()
    sock = end.connect()
    control.send(sock, Hello(protocols=[wire.PROTOCOL], role="client", package="0", pid=1))
    end.point()
    control.receive(sock, Welcome)
    fd = memory.create_memfd("page", nbytes)
    with monkeypatch.context() as patch:
        patch.setattr(memory if lacking == "map_fd" else lane, lacking, fails)
        control.send(sock, AddLane(lane=1, gpu=gpu), (fd,))
        end.point()
    os.close(fd)
    assert control.receive(sock, LaneAdded) == (LaneAdded(lane=1, is_open=False), [])
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    end.point()
    assert open_descriptors() == before
    end.close()
