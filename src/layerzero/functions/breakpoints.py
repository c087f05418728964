"""Breakpoints that calls of this program have come to: said on stderr, with what to run."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
import weakref
from pathlib import Path

from layerzero.client.session.session import Session
from layerzero.ipc.errors import LayerZeroError, ProtocolError
from layerzero.ipc.functions import attach
from layerzero.ipc.functions.attach import Breakpoint
from layerzero.ipc.vocabulary import pools

MAX_NOTED = 256
_heard: dict[str, int] = {}  # by backend: when one was told of last
_listens_for: weakref.ref[Session] | None = None


def listen(session: Session) -> None:
    """Have workers tell this program of breakpoints that its calls come to, unless PYTHONBREAKPOINT=0 says that it
    wants none: they are passed over then. Cheap when that has been done."""
    global _listens_for
    if _listens_for is not None and _listens_for() is session:
        return
    _listens_for = weakref.ref(session)
    welcome = session.link.welcome
    folder = attach.folder_at(welcome.endpoint)
    if folder is None or os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    name = f"told-{welcome.number}"
    try:
        told = attach.bound(folder, name, socket.SOCK_DGRAM)
    except (OSError, LayerZeroError):  # the worker says that nobody could be told
        return
    hung_up = select.poll()
    session.link.watch_hang_up(hung_up)
    hung_up.register(told, select.POLLIN)
    threading.Thread(target=_hear, args=(told, hung_up, folder, name), name="lz-breakpoints", daemon=True).start()


def was_at_one(backend: str, since_ns: int) -> bool:
    """Whether a call came to one in a worker; `since_ns` of time.perf_counter_ns."""
    return _heard.get(backend, since_ns - 1) >= since_ns


def _hear(told: socket.socket, hung_up: select.poll, folder: Path, name: str) -> None:
    weakref.finalize(told, _forget, folder, name, os.getpid())
    with told:
        while all(fd == told.fileno() for fd, _ in hung_up.poll()):
            with contextlib.suppress(ProtocolError, OSError):
                _say(Breakpoint.from_bytes(told.recv(attach.MAX_BYTES)))
    attach.forget(folder, name)


def _say(found: Breakpoint) -> None:
    while len(_heard) >= MAX_NOTED:
        _heard.pop(next(iter(_heard)))
    _heard[found.backend] = time.perf_counter_ns()
    env = pools.environment_of(found.backend).partition(".")[0]
    where = f"{found.label} is at a breakpoint, {found.file}, line {found.line}"
    print(f"[{env}] {where}; run: lz attach {found.backend}", file=sys.stderr, flush=True)


def _forget(folder: Path, name: str, pid: int) -> None:
    if os.getpid() == pid:
        attach.forget(folder, name)


def _forked() -> None:
    global _listens_for
    _listens_for = None  # the thread is the parent's
    _heard.clear()


os.register_at_fork(after_in_child=_forked)
