"""A seeded world around the broker's core, on one thread and a simulated clock.

`run(seed)` drives the real BrokerState with modelled clients, workers and channels. Messages are late and overtake each
other between channels (never within one); workers raise, hang, lie and die at every step; clients leave, retire memory
and break the protocol; ticks are late. The world performs the core's actions as server.py does, keeps the truth about
who writes which memory until when, and raises Violation, with the seed, where the core breaks one of its promises:

- a call of a client that is there ends in exactly one Answer or Refuse, one of a client that left in none;
- no two live workers have the same call or the same memory; a call moves on, and memory is closed, only after the
  worker that had it answered or its exit was confirmed;
- an Answer stands for an attempt that ran to its end, and the memory still holds its result;
- a Run finds its plan and its arenas at the worker;
- attempts end by their deadline, restarts keep to their budget, a call kills two workers at most and is never given
  back to a backend that failed it, but for one whose worker died in it, once, when nobody else is left;
- a call is refused only when no backend is left for it, not even one that restarts within its timeout;
- a backend that crashes have disabled is tried again in time, one with a wrong configuration is not; no backend stays
  disabled for ever by crashes;
- what is due has a wakeup, counters add up, reasons are true, nothing is left behind;
- a lease is granted for what the core would choose again, and ends with the epoch in which it was; a call of an express
  lane ends once for its client, comes to the broker only when its worker is done with it, and brings its death along; a
  call behind it is neither killed for its time nor blamed for it;
- a call on a ring is enqueued by one worker, or comes to the broker once: when that worker leaves it, or is dead; one
  of those that come back from a dead worker is blamed at most, and the right one; a ring is taken back when nothing is
  on it;
- kernels that compile run no call that they are not compiled for, backends compile one thing at a time and none twice;
  a call waits for a compilation only when nobody else is left, and for no longer than its timeout;
- points of a lane end once and in their order, those of a client that is there all do, and none fails that a worker may
  still finish; what is done never runs again; a call on a GPU that must run again gets another answer, no other does;
- of a worker that begins anew, since it got a call of a new kernel behind later ones, no call is blamed and no kernel.
"""

from tests.simulation.backends import ARENA_BYTES, CAPABILITIES, DEVICES, GPU, GPU_CAPABILITIES, route_body
from tests.simulation.coverage import (
    COMPILE_FATES,
    FATES,
    GPU_FATES,
    GRAPH_SLOT_FATES,
    LANE_FATES,
    POINT_FATES,
    RETRY_FATES,
    RING_FATES,
    Coverage,
    Violation,
)
from tests.simulation.world import World, run

__all__ = [
    "ARENA_BYTES",
    "GRAPH_SLOT_FATES",
    "CAPABILITIES",
    "COMPILE_FATES",
    "DEVICES",
    "FATES",
    "GPU",
    "GPU_CAPABILITIES",
    "GPU_FATES",
    "LANE_FATES",
    "RETRY_FATES",
    "RING_FATES",
    "POINT_FATES",
    "Coverage",
    "Violation",
    "World",
    "route_body",
    "run",
]
