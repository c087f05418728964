"""`lz attach`: the debugger of a function that waits at a breakpoint, in its environment's worker."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from layerzero.ipc.errors import InvalidArgument

BLOCK_BYTES = 1 << 16


def attach(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Whose worker; the only one that waits if left out.")
    ] = None,
) -> None:
    """Debug a function that waits at a breakpoint() in its environment: pdb, on this terminal. At the end of input the
    function goes on."""
    from layerzero.client.cli.output import note
    from layerzero.client.connection import start
    from layerzero.ipc.functions import attach as sockets

    folder = start.endpoints().folder / sockets.FOLDER
    waiting = _waiting(folder)
    found = [one for one in waiting if name in (None, one, one.rpartition(".")[0])]
    found = found or [one for one in waiting if one.startswith(f"{name}.")]  # an environment's name
    if len(found) != 1:
        raise InvalidArgument(_which(name, found, waiting), repair="lz status for the names of workers")
    try:
        with sockets.connected(folder, found[0], socket.SOCK_STREAM) as peer:
            note(f"attached to {found[0]}; c goes on, h helps, Ctrl-D leaves")
            with contextlib.suppress(ConnectionError):
                _converse(peer)
    except (ConnectionRefusedError, FileNotFoundError):
        raise InvalidArgument(f"{found[0]} does not wait any more: its call has ended") from None
    note("the function goes on, or its call has ended")


def _waiting(folder: Path) -> list[str]:
    """BACKEND.PID of the workers that wait. What those that were killed have left is removed."""
    from layerzero.ipc.functions import attach as sockets

    try:
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("told-"))
    except FileNotFoundError:
        return []
    for name in [one for one in names if not Path("/proc", one.rpartition(".")[2]).exists()]:
        sockets.forget(folder, name)
        names.remove(name)
    return names


def _which(name: str | None, found: list[str], waiting: list[str]) -> str:
    if not waiting:
        return "no function waits at a breakpoint; one that does says so on its caller's stderr"
    if not found:
        return f"{name} does not wait at a breakpoint; those that do: {', '.join(waiting)}"
    return f"several functions wait at breakpoints; name one of: {', '.join(found)}"


def _converse(peer: socket.socket) -> None:
    """Until the peer has left."""
    events = select.poll()
    events.register(peer, select.POLLIN)
    events.register(sys.stdin.fileno(), select.POLLIN)
    while True:
        for fd, _ in events.poll():
            if fd == peer.fileno():
                said = peer.recv(BLOCK_BYTES)
                if not said:
                    return
                os.write(sys.stdout.fileno(), said)
            elif typed := os.read(fd, BLOCK_BYTES):
                peer.sendall(typed)
            else:
                events.unregister(fd)
                peer.shutdown(socket.SHUT_WR)
