"""Calls by ring and by graph slot to a worker process, on the soft GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gpu.bare_worker import Connect, Spawn, clients
from tests.gpu.graph_slot_checks import GraphSlotChecks
from tests.gpu.peer import ROOT
from tests.gpu.ring_checks import RingChecks
from tests.soft_gpu import soft_gpu

from layerzero.ipc import confinement
from layerzero.ipc.cuda import driver


@pytest.fixture
def spawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spawn]:
    monkeypatch.setenv(confinement.VARIABLE, "0")  # as in gpu_site.py
    spawn = Spawn(tmp_path, soft_gpu.UUID, ROOT / "tests/soft_gpu/soft_toy.py")
    yield spawn
    spawn.close()


@pytest.fixture
def connect(spawn: Spawn) -> Iterator[Connect]:
    context = driver.Context(soft_gpu.driver, soft_gpu.UUID)  # type: ignore[arg-type]
    with clients(context, spawn) as make:
        yield make


class TestRings(RingChecks):
    pass


class TestBells(GraphSlotChecks):
    pass
