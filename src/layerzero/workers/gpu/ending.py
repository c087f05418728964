"""The end of a process that has lost its GPU, or is blocked by it."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from layerzero.ipc.vocabulary.worker_codes import STICKY_EXIT


def end(reason: str, code: int = STICKY_EXIT) -> NoReturn:
    """The process can do nothing more on its GPU; ending at once is what tells the broker."""
    print(f"the worker ends: {reason}", file=sys.stderr, flush=True)
    os._exit(code)


def set_alarm(seconds: float) -> None:
    """The kernel ends the process then, also while a library holds the interpreter's lock; with 0 it does not."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
