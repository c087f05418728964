"""Where a worker hangs, told in its log before it is killed: the stacks of its Python threads, by py-spy where that is
installed, and by the worker's own faulthandler, which needs no more than that it can take a signal."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from layerzero.broker.processes.supervisor import Process

ITSELF_S = 0.05  # for the worker's own words: it is late already
SPY_S = 2.0  # for those of py-spy


def tell_then_kill(process: Process) -> None:
    """Returns at once. What the worker has started ends when its end is seen."""
    try:
        pidfd = os.dup(process.pidfd)
    except OSError:  # no descriptor is left
        process.kill()
        return
    words = (pidfd, process.pid, process.log)
    threading.Thread(target=_tell_then_kill, args=words, name="layerzero.stacks", daemon=True).start()


def _tell_then_kill(pidfd: int, pid: int, log: Path) -> None:
    try:
        with suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGUSR2)
            if not select.select([pidfd], [], [], ITSELF_S)[0] and (spy := shutil.which("py-spy")) is not None:
                _spy(spy, pid, log)
    finally:
        with suppress(OSError):  # it has ended
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def _spy(program: str, pid: int, log: Path) -> None:
    """Its words, and those about why it has none, come to the log."""
    with log.open("ab") as file, suppress(subprocess.TimeoutExpired):
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=SPY_S, check=False)
