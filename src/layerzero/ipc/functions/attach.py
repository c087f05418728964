"""Where breakpoints of functions are reached: sockets in a folder of the broker's runtime folder that is the user's
alone, and what is told of one.

`BACKEND.PID` listens for `lz attach` while a worker waits for it; `told-NUMBER` is where the client with that number
hears of its calls' breakpoints.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.transport.plain import pack_body, unpack_body

FOLDER = "attach"
MAX_BYTES = 4096  # of what is told
MAX_TEXT = 1000
_IPC = "ipc://"


class Breakpoint(NamedTuple):
    """A call that waits at a breakpoint: the worker's backend, the function, its file and line."""

    backend: str
    label: str
    file: str
    line: int

    def to_bytes(self) -> bytes:
        return pack_body([self.backend, self.label[:MAX_TEXT], self.file[-MAX_TEXT:], self.line])

    @classmethod
    def from_bytes(cls, raw: bytes) -> Breakpoint:
        """Raises ProtocolError."""
        match unpack_body(raw):
            case [str(backend), str(label), str(file), int(line)]:
                return cls(backend, label, file, line)
        raise ProtocolError("no breakpoint")


def folder_at(endpoint: str) -> Path | None:
    """In the runtime folder of a broker with this ZeroMQ address; None for one of another machine."""
    return Path(endpoint.removeprefix(_IPC)).parent / FOLDER if endpoint.startswith(_IPC) else None


def bound(folder: Path, name: str, kind: int) -> socket.socket:
    """A socket with that name, which no other has any more. Raises InvalidArgument for a folder that others may
    reach, OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidArgument(f"{folder} must be a directory of user {os.getuid()} with mode 0700")
    forget(folder, name)
    made = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    with _closed_on_error(made), _opened(folder) as directory:
        made.bind(f"{directory}/{name}")
    return made


def connected(folder: Path, name: str, kind: int) -> socket.socket:
    """A socket that is connected to that one. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    with _closed_on_error(made), _opened(folder) as directory:
        made.connect(f"{directory}/{name}")
    return made


def forget(folder: Path, name: str) -> None:
    """Nobody listens there any more."""
    with contextlib.suppress(OSError):
        (folder / name).unlink()


@contextlib.contextmanager
def _opened(folder: Path) -> Any:
    """A short name of a folder: sockets' addresses have 107 bytes."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


@contextlib.contextmanager
def _closed_on_error(one: socket.socket) -> Any:
    try:
        yield
    except BaseException:
        one.close()
        raise
