"""The server behind `lz dashboard`, until Ctrl-C."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

import layerzero as lz
from layerzero.client.capsules import store as capsule_store
from layerzero.client.connection import start
from layerzero.client.history import history_file
from layerzero.dashboard.serving import Nodes, Site, application
from layerzero.dashboard.watching import Broker, Watch
from layerzero.envs.matrix import kept as matrix
from layerzero.ipc import kept_files

GRACE_S = 1  # for answers that are under way at the end
BACKLOG = 64


def run(
    address: str,
    *,
    traces: Path | None,
    token: str | None,
    may_act: bool,
    may_be_reached: bool,
    started: Callable[[str], None],
    nodes: Nodes | None = None,
) -> None:
    """Serve at ADDRESS:PORT until a signal; port 0: any free one. `token`: None for a new one. `may_be_reached`: from
    other machines. `started` is told the address to open. `nodes`: of a cluster, for a view of them. Raises
    InvalidArgument."""
    host, port = _parsed(address, may_be_reached=may_be_reached)
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    where, folder = start.endpoints(), kept_files.store(os.environ)
    broker = Broker(where)
    site = Site(
        broker,
        Watch(broker, history_file.default_path(os.environ, where.folder)),
        capsule_store.folder_of(os.environ),
        (traces or folder / "traces").absolute(),
        matrix.last(folder),
        may_act,
        nodes,
    )
    secret = token or secrets.token_urlsafe(24)
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        application(site, secret, host, port),
        log_level="warning",
        access_log=False,
        http="h11",
        ws="none",
        loop="asyncio",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    started(f"http://{shown}:{port}/?token={secret}")
    uvicorn.Server(config).run(sockets=[listener])


def _parsed(address: str, *, may_be_reached: bool) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        found, number = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host), int(port)
        if not 0 <= number < 1 << 16:
            raise ValueError
    except ValueError:
        raise lz.InvalidArgument(f"give ADDRESS:PORT, such as 127.0.0.1:9465; got {address!r:.80}") from None
    if not found.is_loopback and not may_be_reached:
        raise lz.InvalidArgument(
            f"use an address of this machine alone, such as 127.0.0.1:9465, with ssh -L; {address} can be reached from "
            "other machines, in plain HTTP: --reachable if that is what you want"
        )
    return str(found), number


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise lz.InvalidArgument(f"name another --at: {host}:{port} cannot be had: {exc.strerror}") from exc
    return listener
