"""A worker's express lanes: descriptors and plans that are gone are not kept."""

from __future__ import annotations

import os
import select

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane
from layerzero.ipc.shm.memory import PAGE_BYTES, create_memfd
from layerzero.workers.lanes import Lanes


def lent(page: int) -> list[int]:
    """What comes with map_lane."""
    ringing, hearing = lane.create_answer_bell()
    hearing.close()
    return [page, lane.create_doorbell(), ringing.detach()]


def test_a_lane_that_cannot_be_opened_leaves_no_descriptor() -> None:
    """The broker goes on with other clients; this worker would run out of descriptors."""
    lanes, before = Lanes(select.poll()), os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError):  # cannot be mapped to be written
        lanes.open(1, 1, lent(os.open(os.devnull, os.O_RDONLY)))
    with pytest.raises(ProtocolError, match="needed: 3"):
        lanes.open(1, 1, [create_memfd("page", PAGE_BYTES)])
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(OSError, match="non-socket"):
        lanes.open(1, 1, [create_memfd("page", PAGE_BYTES), lane.create_doorbell(), lane.create_doorbell()])
    assert os.listdir("/proc/self/fd") == before
    lanes.open(1, 1, lent(create_memfd("page", PAGE_BYTES)))
    held = os.listdir("/proc/self/fd")
    with pytest.raises(ProtocolError, match="once"):
        lanes.open(1, 1, lent(create_memfd("page", PAGE_BYTES)))
    assert os.listdir("/proc/self/fd") == held
    lanes.close(1)
    assert os.listdir("/proc/self/fd") == before


def test_a_plan_is_allowed_until_it_is_gone() -> None:
    """Numbers of plans never come again, and a lease may name a lane that no client opens."""
    lanes = Lanes(select.poll())
    for plan in range(1, 100):
        lanes.allow(1, plan)
        lanes.allow(2, plan)
    assert lanes.allows(1, 7)
    for plan in range(1, 100):
        lanes.forget_plan(plan)
    assert not lanes.allows(1, 7)
    assert lanes._plans == {}
