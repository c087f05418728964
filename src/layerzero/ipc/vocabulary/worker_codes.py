"""What a worker says without a message: the two words of its control page, and its exit code. Values only.

Workers write them, the broker reads them; docs/protocol.md (sections 6, 12 and 13) has what follows from each.
"""

from __future__ import annotations

# Phase of the call that the control page names.
IDLE, MAPPED, EXECUTING, WRITTEN = range(4)
PHASES = ("idle", "mapped", "executing", "written")

# Exit codes; any other is a crash like another.
STICKY_EXIT = 70  # the GPU context is lost: what its GPU was in is to blame
RENEWAL_EXIT = 71  # calls came in an order in which this process could not run them: nobody is to blame
STALLED_EXIT = -14  # SIGALRM: of one that noticed that too late to end by itself

LANE_CALL = 1 << 63  # bit of the dispatch word: the worker is in a call of an express lane or a ring


def phase_name(phase: int) -> str:
    """Of what a control page says."""
    return PHASES[phase] if phase < len(PHASES) else "unknown"


def mark(lane: int, call: int) -> int:
    """The dispatch word of a worker that runs a lane's call."""
    return LANE_CALL | lane << 32 | call & 0xFFFF_FFFF


def lane_of(dispatch: int) -> int:
    """The lane that a dispatch word names; 0 when it names none."""
    return (dispatch & ~LANE_CALL) >> 32 if dispatch & LANE_CALL else 0
