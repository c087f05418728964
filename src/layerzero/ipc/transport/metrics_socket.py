"""The socket on which metrics are to be had: of a port, or of this machine's files."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from layerzero.ipc.errors import ConfigError

BACKLOG = 16
UNIX = "unix:"


def listen(given: str, *, has_token: bool) -> tuple[socket.socket, Path | None]:
    """At ADDRESS:PORT or unix:PATH; and that path. Raises ConfigError, also for an address that others reach and that
    asks for no token."""
    if given.startswith(UNIX):
        path = Path(given.removeprefix(UNIX))
        return _listen_here(path), path
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
    if not address.is_loopback and not has_token:
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
    return listener, None


def _listen_here(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):  # of a process that was killed
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
    return listener
