"""The process that shows metrics by HTTP. It is a client like any other: a scrape costs the broker's loop one
question."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.processes.companion import Companion
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.transport import metrics_socket, secret
from layerzero.ipc.transport.endpoints import Endpoints


class Exporter:
    """Owns the socket that it listens on, so that an exporter that ends can be started anew. Raises ConfigError."""

    def __init__(self, settings: Settings, endpoints: Endpoints) -> None:
        self._listener: socket.socket | None = None
        self._process: Companion | None = None
        self._path: Path | None = None
        if not settings.metrics:
            return
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigError(
                "setting metrics needs prometheus-client: pip install 'layerzero-broker[metrics]', or leave it empty"
            )
        self._token_file = settings.metrics_token_file
        if self._token_file is not None:
            secret.read(self._token_file)
        self._endpoints = endpoints
        self._listener, self._path = metrics_socket.listen(settings.metrics, has_token=self._token_file is not None)
        self._process = self._started()

    def _started(self) -> Companion:
        assert self._listener is not None
        arguments = ["--fd", str(self._listener.fileno()), "--runtime-dir", str(self._endpoints.folder)]
        if self._token_file is not None:
            arguments += ["--token-file", str(self._token_file.absolute())]
        listener = self._listener.fileno()
        return Companion("metrics", "layerzero.client.metrics", arguments, self._endpoints.log, (listener,))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def look(self) -> None:
        """Start it again when it has ended: now and then."""
        if self._process is not None:
            self._process.look()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._process is not None:
            self._process.close()
