"""What a process that a broker has started beside itself does first."""

from __future__ import annotations

import ctypes
import os
import signal

NICENESS = 10  # calls come first
_PR_SET_PDEATHSIG = 1


def begin(parent_pid: int) -> bool:
    """End with the broker, and leave calls the cores. False when it has ended before."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        return False
    os.nice(NICENESS)
    return True
