"""What must outlive its owner in this process: another process, the driver or a GPU's stream may still use it, and
memory that was let go of would be the next tensor's. Nothing else in the client keeps a thing that nobody here uses.
"""

from __future__ import annotations

import math
import time

QUARANTINE_S = 10.0

_kept: list[object] = []
_quarantine: list[tuple[float, object]] = []


def keep(thing: object) -> None:
    """Until this process ends. Takes no lock: a forked child may call it, and so may who was interrupted."""
    _kept.append(thing)


def quarantine(hold: object, *, is_broker_dead: bool) -> None:
    """Keep memory that a worker may still write to although nobody waits for it.

    The kernel kills the workers of a dead broker; after QUARANTINE_S nothing of them can be left. Workers of one that
    lives go on, and it does not say when they are done: that memory is never used again.
    """
    now_s = time.monotonic()
    _quarantine[:] = [entry for entry in _quarantine if entry[0] > now_s]
    _quarantine.append((now_s + QUARANTINE_S if is_broker_dead else math.inf, hold))
