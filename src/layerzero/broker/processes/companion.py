"""A process that the broker starts beside itself, that asks it like any client, and that ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from layerzero.ipc.logs import log

STOP_GRACE_S = 2.0


class Companion:
    """`module` of ours with these arguments; its output goes to the file `log_file`. `event` begins the names of what
    is logged of it. One that ends is started again when somebody looks."""

    def __init__(
        self, event: str, module: str, arguments: Sequence[str], log_file: Path, pass_fds: Sequence[int] = ()
    ) -> None:
        self._event = event
        self._command = [sys.executable, "-P", "-m", module, "--parent-pid", str(os.getpid()), *arguments]
        self._log_file = log_file
        self._pass_fds = pass_fds
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._log_file, "ab") as log_file:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                cwd="/",
                pass_fds=self._pass_fds,
                start_new_session=True,
            )
        log(f"{self._event}.started", pid=process.pid)
        return process

    def look(self) -> None:
        """Start it again when it has ended: now and then."""
        if self._process.poll() is not None:
            log(f"{self._event}.ended", exit_code=self._process.returncode)
            self._process = self._start()

    def close(self) -> None:
        """End it, and wait for that."""
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
