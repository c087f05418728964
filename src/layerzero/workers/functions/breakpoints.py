"""`breakpoint()` in a function: pdb, over a socket that `lz attach` connects to. Where the caller cannot be told of it,
the function goes on."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.functions import attach
from layerzero.ipc.functions.attach import Breakpoint
from layerzero.ipc.transport import control

if TYPE_CHECKING:
    from layerzero.workers.functions.debugger import Debugger


class Breakpoints:
    """Those of a worker's functions, from now on. `client`, `label`: of the call that runs."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._folder: Path | None = None
        self.client, self.label = 0, ""
        self._debugger: Debugger | None = None
        sys.breakpointhook = self.stop

    def begin(self, endpoint: str) -> None:
        """`endpoint`: of the broker; `lz attach` and callers are found beside it."""
        self._folder = attach.folder_at(endpoint)

    def stop(self, *_: Any, **__: Any) -> None:
        """As sys.breakpointhook: wait for `lz attach`, and let it debug the caller of this."""
        frame = sys._getframe(1)
        if self._debugger is None or self._debugger.is_gone:
            self.end()
            from layerzero.workers.functions.debugger import Debugger

            try:
                self._debugger = Debugger(self._attached(frame))
            except (OSError, LayerZeroError) as exc:
                where = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
                print(f"breakpoint() passed over, {where}: its caller cannot be told: {exc}", file=sys.stderr)
                return
        self._debugger.set_trace(frame)  # the last thing here: what follows would be debugged

    def _attached(self, frame: FrameType) -> socket.socket:
        """Who attaches. The deadline of the call goes on meanwhile."""
        if self._folder is None:
            raise FileNotFoundError("there is none here")
        name = f"{self._backend}.{os.getpid()}"
        with attach.bound(self._folder, name, socket.SOCK_STREAM) as listening:
            try:
                listening.listen(1)
                told = Breakpoint(self._backend, self.label, frame.f_code.co_filename, frame.f_lineno)
                with attach.connected(self._folder, f"told-{self.client}", socket.SOCK_DGRAM) as caller:
                    caller.send(told.to_bytes())
                while True:
                    found, _ = listening.accept()
                    if control.peer_credentials(found)[1] in (os.getuid(), 0):
                        return found
                    found.close()
            finally:
                attach.forget(self._folder, name)

    def end(self) -> None:
        """The call has ended, and whoever is attached is told so."""
        if self._debugger is not None:
            sys.settrace(None)
            self._debugger.close()
            self._debugger = None
