"""A worker's life: states, signals, one transition table. `step` is the only way from one state to another."""

from __future__ import annotations

from enum import Enum


class WorkerState(Enum):
    """One worker per backend gets calls; another may start to take over from it, and earlier ones may finish what they
    have. A READY worker with open calls shows as busy; that needs no state of its own."""

    ABSENT = "absent"  # not needed so far
    PROBING = "probing"  # a throw-away process tries the environment
    STARTING = "starting"  # spawned, provider not loaded yet
    READY = "ready"
    KILLING = "killing"  # SIGKILL sent; its memory is still lent until the exit is confirmed
    BACKOFF = "backoff"  # died; restarts at `retry_at_s`
    DISABLED = "disabled"  # until someone repairs it, or, after crashes, until `retry_at_s`; the cause is kept
    DRAINING = "draining"  # another one has taken over; it finishes what it has
    RETIRED = "retired"  # and has ended; final
    STOPPING = "stopping"  # told to finish and exit
    STOPPED = "stopped"  # final


class Signal(Enum):
    NEEDED = "needed"
    PROBE_PASSED = "probe_passed"
    PROBE_FAILED = "probe_failed"
    SPAWN_FAILED = "spawn_failed"
    LOADED = "loaded"
    FAULT = "fault"  # deadline, bad message, start timeout: the broker kills it
    EXITED = "exited"
    RETRY_DUE = "retry_due"
    GIVEN_UP = "given_up"  # restart budget spent, it failed when it was tried again, or it said that it cannot load
    RESET = "reset"  # someone repaired it
    REPLACED = "replaced"  # another one takes over
    STOP = "stop"


_S, _G = WorkerState, Signal

TRANSITIONS: dict[tuple[WorkerState, Signal], WorkerState] = {
    (_S.ABSENT, _G.NEEDED): _S.PROBING,
    (_S.ABSENT, _G.RESET): _S.ABSENT,
    (_S.ABSENT, _G.STOP): _S.STOPPED,
    (_S.PROBING, _G.PROBE_PASSED): _S.STARTING,
    (_S.PROBING, _G.PROBE_FAILED): _S.DISABLED,
    (_S.PROBING, _G.STOP): _S.STOPPED,
    (_S.STARTING, _G.LOADED): _S.READY,
    (_S.STARTING, _G.SPAWN_FAILED): _S.DISABLED,
    (_S.STARTING, _G.FAULT): _S.KILLING,
    (_S.STARTING, _G.EXITED): _S.BACKOFF,
    (_S.STARTING, _G.STOP): _S.STOPPING,
    (_S.READY, _G.FAULT): _S.KILLING,
    (_S.READY, _G.EXITED): _S.BACKOFF,
    (_S.READY, _G.STOP): _S.STOPPING,
    (_S.KILLING, _G.EXITED): _S.BACKOFF,
    (_S.KILLING, _G.STOP): _S.STOPPING,
    (_S.BACKOFF, _G.RETRY_DUE): _S.STARTING,
    (_S.BACKOFF, _G.GIVEN_UP): _S.DISABLED,
    (_S.BACKOFF, _G.RESET): _S.ABSENT,
    (_S.BACKOFF, _G.STOP): _S.STOPPED,
    (_S.DISABLED, _G.RETRY_DUE): _S.STARTING,
    (_S.DISABLED, _G.RESET): _S.ABSENT,
    (_S.DISABLED, _G.STOP): _S.STOPPED,
    (_S.READY, _G.REPLACED): _S.DRAINING,
    (_S.KILLING, _G.REPLACED): _S.DRAINING,
    (_S.BACKOFF, _G.REPLACED): _S.RETIRED,
    (_S.DRAINING, _G.FAULT): _S.DRAINING,
    (_S.DRAINING, _G.EXITED): _S.RETIRED,
    (_S.DRAINING, _G.STOP): _S.STOPPING,
    (_S.STOPPING, _G.FAULT): _S.STOPPING,
    (_S.STOPPING, _G.EXITED): _S.STOPPED,
}


class IllegalTransition(Exception):
    """The broker's core got a signal that its state table does not know: a bug, never a peer's fault."""


def step(state: WorkerState, signal: Signal) -> WorkerState:
    """The next state. A missing pair raises IllegalTransition."""
    try:
        return TRANSITIONS[state, signal]
    except KeyError:
        raise IllegalTransition(f"{signal.name} in state {state.name}") from None
