"""The process that shows metrics by HTTP. It is a client like any other: a scrape costs the broker's loop one
question."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.processes.companion import Companion
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.transport import secret
from layerzero.ipc.transport.endpoints import Endpoints

BACKLOG = 16
UNIX = "unix:"


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
        self._listener = self._listen(settings.metrics)
        self._process = self._started()

    def _listen(self, given: str) -> socket.socket:
        if given.startswith(UNIX):
            return self._listen_here(Path(given.removeprefix(UNIX)))
        host, _, port = given.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            address, number = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host), int(port)
            if not 0 < number < 1 << 16:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"metrics is {given!r:.80}; allowed: ADDRESS:PORT, such as 127.0.0.1:9464, or unix:PATH"
            ) from None
        if not address.is_loopback and self._token_file is None:
            raise ConfigError(
                f"metrics at {given} could be read from other machines: name a token file (metrics_token_file), which "
                "lz keys secret FILE makes, or an address of this machine alone, such as 127.0.0.1"
            )
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((str(address), number))
            listener.listen(BACKLOG)
        except OSError as exc:
            listener.close()
            raise ConfigError(f"metrics cannot be shown at {given}: {exc.strerror}; name another address") from exc
        return listener

    def _listen_here(self, path: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):  # of a broker that was killed
                    path.unlink()
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            listener.listen(BACKLOG)
        except OSError as exc:
            listener.close()
            raise ConfigError(f"metrics cannot be shown at {path}: {exc.strerror or exc}; name another path") from exc
        self._path = path
        return listener

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
