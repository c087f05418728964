"""client/connection/express.py: this process's end of a lane."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.connection.express import Lane
from layerzero.ipc.errors import BrokerLost


def test_a_lane_that_cannot_be_opened_leaves_no_descriptor() -> None:
    """It is tried again with the next lease, and an application has its own use for descriptors."""

    def is_gone(*_: Any) -> None:
        raise BrokerLost("the broker is gone")

    link: Any = SimpleNamespace(welcome=SimpleNamespace(timeout_s=1.0), add_lane=is_gone)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BrokerLost):
        Lane(link, 1)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("bells", [None, []])
def test_a_lane_without_bells_is_not_used(bells: list[int] | None) -> None:
    """Its worker is gone, or no descriptors were left for them."""
    link: Any = SimpleNamespace(welcome=SimpleNamespace(timeout_s=1.0), add_lane=lambda *_: bells)
    before = os.listdir("/proc/self/fd")
    lane = Lane(link, 1)
    assert lane.is_ended
    lane.close()
    del lane  # the page stays mapped while somebody has it
    assert os.listdir("/proc/self/fd") == before
