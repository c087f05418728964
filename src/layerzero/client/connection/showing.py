"""What a client sends the broker by the control socket with descriptors, and which answer is to it."""

from __future__ import annotations

from typing import TypeAlias

from layerzero.ipc.transport import messages
from layerzero.ipc.transport.counter_messages import AddCounters, CountersAdded

Shown: TypeAlias = (
    messages.AddArena | messages.AddLane | messages.AddGpu | messages.AddGpuArena | messages.GetLifted | AddCounters
)
ANSWERS = (
    messages.ArenaAdded,
    messages.LaneAdded,
    messages.GpuAdded,
    messages.LiftedGiven,
    CountersAdded,
    messages.Refused,
)


def answers(answer: messages.Message, shown: Shown) -> bool:
    """Whether one of ANSWERS is to what was shown, and not a late one to something before it."""
    match shown:
        case messages.AddLane():
            return isinstance(answer, messages.LaneAdded) and answer.lane == shown.lane
        case messages.GetLifted():
            return isinstance(answer, messages.LiftedGiven) and answer.digest == shown.digest
        case messages.AddGpu():
            return isinstance(answer, messages.GpuAdded) and answer.gpu == shown.gpu
        case AddCounters():
            return isinstance(answer, CountersAdded)
    return isinstance(answer, messages.ArenaAdded) and answer.arena == shown.arena
