"""Looking at shared memory for a moment in place of sleeping: for how long, and whether there are cores for it.

A wake-up costs more than many kernels. So who waits for the other side of an express lane looks at its page first, if
the last looks were not in vain, and if no other process wants the core (docs/dispatch.md). What is compiled
does the same: ipc/shm/_lane.h.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from layerzero.ipc.errors import ConfigError

VARIABLE = "LAYERZERO_SPIN_US"
DEFAULT_US, MAX_US = 100, 10_000
ASK_AGAIN_NS = 10_000_000  # what was found of the cores holds for so long
MAX_MISSED = 63
MARGIN, SLACK_NS = 4, 20_000
_LOADAVG = Path("/proc/loadavg")
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def limit_ns(environ: Mapping[str, str]) -> int:
    """For how long to look at most; 0: not at all. Raises ConfigError for what is no number of microseconds."""
    text = environ.get(VARIABLE, "").strip() or str(DEFAULT_US)
    if not text.isdecimal() or int(text) > MAX_US:
        raise ConfigError(f"{VARIABLE}={text!r}; allowed: whole microseconds from 0, which is never, to {MAX_US}")
    return 1000 * int(text)


class Cores:
    """Whether there is one for each process that wants to run, this one and those that it looks for included."""

    def __init__(self) -> None:
        self.count = _core_count()

    def are_free(self) -> bool:
        """False where nobody knows."""
        if self.count < 2:
            return False
        try:
            running = int(_LOADAVG.read_bytes().split()[3].partition(b"/")[0])
        except (OSError, ValueError, IndexError):
            return False
        return running <= self.count


def _core_count() -> int:
    """Those that this process may use: of its mask, and as many whole ones as its control group's quota gives."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_MAX.read_text().split()
        return count if quota == "max" else min(count, int(quota) // int(period))
    except (OSError, ValueError):
        return count


class Spin:
    """How long to look now: some times as long as it usually takes until the other side is seen. After a look that was
    in vain it is tried again after ever more waits, and for long, since the other side sleeps by then."""

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._cores = Cores() if limit_ns else None
        self._usual_ns = limit_ns
        self._missed = self._skipped = self._asked_ns = 0
        self._are_free = False

    def next_ns(self) -> int:
        if self._cores is None:
            return 0
        if self._skipped < self._missed:
            self._skipped += 1
            return 0
        now_ns = time.perf_counter_ns()
        if now_ns - self._asked_ns > ASK_AGAIN_NS:
            self._are_free, self._asked_ns = self._cores.are_free(), now_ns
        if not self._are_free:
            return 0
        return self._limit_ns if self._missed else min(MARGIN * self._usual_ns + SLACK_NS, self._limit_ns)

    def note(self, took_ns: int | None) -> None:
        """What came of the look: the other side was seen after so long, or not at all."""
        self._skipped = 0
        if took_ns is None:
            self._missed = min(2 * self._missed + 1, MAX_MISSED)
        else:
            self._missed //= 2
            self._usual_ns += (took_ns - self._usual_ns) // 4
