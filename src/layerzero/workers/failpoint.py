"""Faults on request, for tests: `phase=action[@N]` items in BootConfig.failpoints, off unless asked for.

Phases in order: received, mapped, executing, written, sent. `@N` fires at the N-th passage only.
Actions end or stop the process here (kill, segv, abort, exit0, hang) or make the loop misbehave (raise, garbage, stale,
truncated, silent).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

PHASES = ("received", "mapped", "executing", "written", "sent")
SPOILERS = ("garbage", "stale", "truncated", "silent")  # what becomes of the reply
ACTIONS = ("kill", "segv", "abort", "exit0", "hang", "raise", *SPOILERS)


class Failpoints:
    """Counts passages and acts. Empty text: every call is a no-op, and the loop skips the calls."""

    def __init__(self, text: str) -> None:
        self._points: dict[str, tuple[str, int]] = {}
        self._passed: dict[str, int] = {}
        for item in filter(None, text.split(",")):
            phase, _, rest = item.partition("=")
            action, _, nth = rest.partition("@")
            if phase not in PHASES or action not in ACTIONS or (action in SPOILERS and phase != "written"):
                raise ValueError(f"failpoint {item!r}: phases {PHASES}, actions {ACTIONS}; {SPOILERS} in written only")
            self._points[phase] = (action, int(nth or 0))

    def __bool__(self) -> bool:
        return bool(self._points)

    def hit(self, phase: str) -> str:
        """Act if this phase is armed; the returned action, or "", is for the loop to carry out."""
        if phase not in self._points:
            return ""
        action, nth = self._points[phase]
        self._passed[phase] = passed = self._passed.get(phase, 0) + 1
        if nth not in (0, passed):
            return ""
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                ctypes.string_at(0)
            case "abort":
                os.abort()
            case "exit0":
                os._exit(0)
            case "hang":
                threading.Event().wait()
            case "raise":
                raise RuntimeError(f"failpoint {phase}=raise")
        return action
