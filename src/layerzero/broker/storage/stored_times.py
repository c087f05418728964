"""Measured times on their way between the engine and the database of measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from layerzero.broker.core import events as ev
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.timings import PerfRow
from layerzero.broker.storage.perf_rows import Identity
from layerzero.broker.storage.perfdb import PerfDB
from layerzero.ipc.version import __version__

SAVE_S = 1.0  # from the first time that is not stored yet to the next save


class StoredTimes:
    """`post` takes TimesLoaded from the database's thread."""

    def __init__(self, path: Path, engine: Engine, launcher: Launcher, post: Callable[[ev.Event], None]) -> None:
        self._engine = engine
        self._launcher = launcher
        self._post = post
        self.perfdb = PerfDB(path, self._load)
        self.identities: dict[str, Identity] = {}  # what is known of each backend's environment
        self.due_s = math.inf  # what is new waits until then
        for backend, record in launcher.records().items():
            self.identify(backend, record.versions)

    def identify(self, backend: str, versions: Mapping[str, str]) -> None:
        """Tell the database what times of this backend depend on; it answers with those it has."""
        capability, device = self._engine.capabilities[backend], self._engine.device_for(backend)
        identity = Identity(
            device_uuid=device.device_uuid,
            driver_version=device.driver_version,
            cuda_version=device.cuda_version,
            backend_version=capability.backend_version,
            torch_version=versions.get("torch", ""),
            layerzero_version=__version__,
            capabilities_hash=capability.hash,
            env_hash=self._launcher.env_ids().get(backend, ""),
        )
        self.identities[backend] = identity
        self.perfdb.identify(backend, identity, capability.kernel_ids)

    def _load(self, _: str, rows: list[PerfRow]) -> None:
        """On the thread of the database."""
        self._post(ev.TimesLoaded(rows))

    def save(self, now_s: float) -> None:
        """Hand over what is new, some time after it came."""
        engine = self._engine
        if now_s >= self.due_s:
            self.due_s = math.inf
            self.perfdb.save(engine.perf.take_dirty())
        if self.due_s == math.inf and engine.perf.has_dirty:
            self.due_s = now_s + SAVE_S

    def close(self) -> None:
        """Save what is new and close the database."""
        while rows := self._engine.perf.take_dirty():
            self.perfdb.save(rows)
        self.perfdb.close()
