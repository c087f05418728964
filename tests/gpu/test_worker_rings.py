"""Calls by ring and by graph slot to a worker process on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gpu.bare_worker import Connect, Spawn, clients
from tests.gpu.graph_slot_checks import GraphSlotChecks
from tests.gpu.ring_checks import RingChecks

from layerzero.ipc.cuda import driver


@pytest.fixture
def spawn(context: driver.Context, tmp_path: Path) -> Iterator[Spawn]:
    spawn = Spawn(tmp_path, context.gpu)
    yield spawn
    spawn.close()


@pytest.fixture
def connect(current: driver.Context, spawn: Spawn) -> Iterator[Connect]:
    with clients(current, spawn) as make:
        yield make


class TestRings(RingChecks):
    pass


class TestBells(GraphSlotChecks):
    pass
