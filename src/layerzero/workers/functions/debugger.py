"""pdb for somebody who has attached by a socket."""

from __future__ import annotations

import pdb
import socket
from typing import IO, cast


class Debugger(pdb.Pdb):
    """Somebody who is attached. Our own code is stepped over; when he leaves, the function goes on."""

    def __init__(self, peer: socket.socket) -> None:
        self._line = _Line(peer)
        file = cast("IO[str]", self._line)
        super().__init__(stdin=file, stdout=file, skip=["layerzero.*"], nosigint=True, readrc=False)

    @property
    def is_gone(self) -> bool:
        return self._line.is_gone

    def do_EOF(self, arg: str) -> bool | None:  # as pdb calls it
        """Nobody is there any more."""
        self.clear_all_breaks()
        return self.do_continue(arg)

    def close(self) -> None:
        self._line.close()


class _Line:
    """A peer as a text file, which is at its end when he has left."""

    encoding = "utf-8"

    def __init__(self, peer: socket.socket) -> None:
        self._peer, self._file = peer, peer.makefile("r", encoding="utf-8", errors="replace")
        self.is_gone = False

    def readline(self) -> str:
        try:
            found = self._file.readline()
        except OSError:
            found = ""
        self.is_gone = self.is_gone or not found
        return found

    def write(self, text: str) -> int:
        try:
            self._peer.sendall(text.encode("utf-8", "replace"))
        except OSError:
            self.is_gone = True
        return len(text)

    def flush(self) -> None:
        """Everything is sent at once."""

    def isatty(self) -> bool:
        return False

    def close(self) -> None:
        self._file.close()
        self._peer.close()
