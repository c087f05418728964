"""Processes that ask what the broker sees, for people: the exporter of metrics, and the recorder of history. They are
clients, but do not keep a broker that has no others."""

from __future__ import annotations

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.processes.companion import Companion
from layerzero.broker.processes.exporter import Exporter
from layerzero.ipc.transport.endpoints import Endpoints


class Observers:
    """Those that settings ask for. Raises ConfigError when metrics cannot be shown where they should be."""

    def __init__(self, settings: Settings, endpoints: Endpoints) -> None:
        self._exporter = Exporter(settings, endpoints)
        self._recorder: Companion | None = None
        if settings.history:
            arguments = ["--runtime-dir", str(endpoints.folder), "--store", str(settings.store.absolute())]
            if settings.secret_file is not None:
                arguments += ["--secret-file", str(settings.secret_file.absolute())]
            self._recorder = Companion("history", "layerzero.client.history", arguments, endpoints.log)

    def has(self, pid: int) -> bool:
        """Whether it is one of these processes."""
        return pid in (self._exporter.pid, None if self._recorder is None else self._recorder.pid)

    def look(self) -> None:
        """Start again what has ended: now and then."""
        self._exporter.look()
        if self._recorder is not None:
            self._recorder.look()

    def close(self) -> None:
        self._exporter.close()
        if self._recorder is not None:
            self._recorder.close()
