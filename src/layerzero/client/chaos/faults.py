"""Faults done to real processes: signals through pidfds, and shutdown of a socket that another process has open."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from layerzero.ipc.transport.endpoints import Endpoints

SLOW_CYCLE_S = (0.03, 0.01)  # stopped and running, for as long as a process is slow
_PIDFD_GETFD = 438  # the same on every architecture; glibc has no wrapper that can be counted on
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}

Later = Callable[[float, Callable[[], None]], None]


def processes(folder: Path) -> Iterator[tuple[int, str, str]]:
    """Pid, command line and stderr of the running processes that belong to a runtime folder."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            stderr = os.readlink(entry / "fd" / "2")
        except OSError:  # it has ended, or is another user's
            continue
        if command and (str(folder) in command or stderr.startswith(str(folder))):  # a zombie has no command line
            yield int(entry.name), command, stderr


def worker_pid(where: Endpoints, backend: str) -> int | None:
    """Pid of a backend's worker, found without the broker: it may be what is broken."""
    log = str(where.worker_log(backend))
    for pid, command, stderr in processes(where.folder):
        if stderr == log and "layerzero.workers " in command:
            return pid
    return None


class Faults:
    """Does faults. `later(in_s, action)` puts off the second half of those that last."""

    def __init__(self, where: Endpoints, later: Later) -> None:
        self._where = where
        self._later = later

    def inject(self, pid: int | None, kind: str, lasts_s: float) -> str:
        """Returns what came of it: "done", or why nothing did."""
        if pid is None:
            return "absent"
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return "absent"
        try:
            if kind == "disconnect":
                return self._disconnect(pid, pidfd)
            if kind == "slow":
                self._slow(os.dup(pidfd), lasts_s)
                return "done"
            signal.pidfd_send_signal(pidfd, SIGNALS[kind])
            if kind == "stop":
                self._go_on(os.dup(pidfd), lasts_s)
            return "done"
        except ProcessLookupError:
            return "absent"
        finally:
            os.close(pidfd)

    def _go_on(self, pidfd: int, in_s: float) -> None:
        def go_on() -> None:
            _send(pidfd, signal.SIGCONT)
            os.close(pidfd)

        self._later(in_s, go_on)

    def _slow(self, pidfd: int, lasts_s: float) -> None:
        """Most of the time it stands still."""
        left_s = lasts_s
        still_s, running_s = SLOW_CYCLE_S

        def stand() -> None:
            nonlocal left_s
            left_s -= still_s + running_s
            if left_s <= 0 or not _send(pidfd, signal.SIGSTOP):
                os.close(pidfd)
                return
            self._later(still_s, run)

        def run() -> None:
            _send(pidfd, signal.SIGCONT)
            self._later(running_s, stand)

        stand()

    def _disconnect(self, pid: int, pidfd: int) -> str:
        """End the control connection of a worker or a client, which both sides see as a hang-up."""
        libc = ctypes.CDLL(None, use_errno=True)
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if not os.readlink(entry).startswith("socket:"):
                    continue
            except FileNotFoundError:
                continue
            fd = libc.syscall(_PIDFD_GETFD, pidfd, int(entry.name), 0)
            if fd < 0:
                return f"not allowed: {os.strerror(ctypes.get_errno())}"
            with socket.socket(fileno=fd) as copy:
                if copy.family == socket.AF_UNIX and _peer(copy) == str(self._where.control):
                    copy.shutdown(socket.SHUT_RDWR)
                    return "done"
        return "absent"


def _peer(sock: socket.socket) -> str:
    try:
        return os.fsdecode(sock.getpeername())
    except OSError:  # it listens, or was shut down
        return ""


def _send(pidfd: int, number: signal.Signals) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True
