"""client/connection/express.py: this process's end of a lane."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.connection.express import Lane
from layerzero.ipc.errors import BrokerLost
from layerzero.ipc.shm import lane


@pytest.mark.parametrize("step", ["first bell", "second bell", "broker"])
def test_a_lane_that_cannot_be_opened_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """It is tried again with the next lease, and an application has its own use for descriptors."""
    create, made = lane.create_doorbell, [0]

    def runs_out() -> int:
        made[0] += 1
        if made[0] == {"first bell": 1, "second bell": 2, "broker": 3}[step]:
            raise OSError(24, "Too many open files")
        return create()

    def is_gone(*_: Any) -> bool:
        raise BrokerLost("the broker is gone")

    monkeypatch.setattr(lane, "create_doorbell", runs_out)
    link: Any = SimpleNamespace(welcome=SimpleNamespace(timeout_s=1.0), add_lane=is_gone)
    before = os.listdir("/proc/self/fd")
    with pytest.raises((OSError, BrokerLost)):
        Lane(link, 1)
    assert os.listdir("/proc/self/fd") == before
