"""A call's life: states, one table of moves. `move` is the only way from one state to another; it keeps the containers
that calls are in and the counts of their clients in step.

A state is where the call is, so a call is in exactly one place. What is true of a call besides (whether its client has
gone on or wants it no more) is a field of the record.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.broker.core.model import Call, Worker


class CallState(IntEnum):
    """Numbers, since each call passes some of them: a lookup by a plain enum costs three times as much."""

    IN_HAND = 0  # the core decides on it; before the present event is over it is in another state
    WAITING = 1  # for a worker: in its `waiting`
    COMPILING = 2  # waits for a kernel to be compiled: in `CompileWaits`
    RUNNING = 3  # sent to a worker, which has not answered: in its `running`
    ENQUEUED = 4  # answered, and the GPU is not known to be done with it: in its worker's `enqueued`
    BOUND = 5  # answered, and served whenever its client's graph rings: in its worker's `graph_slots`
    REFUSED = 6  # has failed for good, which its client hears when its stream has come to it: in `StreamOrder`
    CLOSED = 7  # final


_S = CallState

MOVES: dict[CallState, frozenset[CallState]] = {
    _S.IN_HAND: frozenset({_S.WAITING, _S.COMPILING, _S.RUNNING, _S.ENQUEUED, _S.BOUND, _S.REFUSED, _S.CLOSED}),
    _S.WAITING: frozenset({_S.IN_HAND, _S.RUNNING, _S.CLOSED}),  # CLOSED: its client has left, or wants it no more
    _S.COMPILING: frozenset({_S.IN_HAND}),
    _S.RUNNING: frozenset({_S.IN_HAND}),  # its worker has answered, or is gone
    _S.ENQUEUED: frozenset({_S.IN_HAND, _S.CLOSED}),  # IN_HAND: its worker is gone
    _S.BOUND: frozenset({_S.IN_HAND, _S.CLOSED}),  # likewise
    _S.REFUSED: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}

# Looked up once: an attribute of an enum costs more than a global name, and each call needs several.
_IN_HAND, _WAITING, _COMPILING, _RUNNING = _S.IN_HAND, _S.WAITING, _S.COMPILING, _S.RUNNING
_ENQUEUED, _BOUND, _CLOSED = _S.ENQUEUED, _S.BOUND, _S.CLOSED


class IllegalMove(Exception):
    """The broker's core moved a call in a way that the table does not have: a bug, never a peer's fault."""


def begin(call: Call) -> None:
    """It has come to the broker, and is in hand."""
    call.client.open_calls += 1


def move(call: Call, to: CallState, worker: Worker | None = None) -> None:
    """Take the call out of where it is and put it there. `worker`: whose, for the states that are at one; the dispatch
    of a call must be set before it goes to RUNNING. A pair that the table lacks raises IllegalMove."""
    was, had = call.state, call.worker
    if to not in MOVES[was]:
        raise IllegalMove(f"call {call.seq} of client {call.client.number} from {was.name} to {to.name}")
    if had is not None:
        if was is _RUNNING:
            had.running.remove(call)
        elif was is _WAITING:
            (had.waiting.serve if to is _RUNNING else had.waiting.remove)(call)
        else:
            del (had.enqueued if was is _ENQUEUED else had.graph_slots)[call.dispatch]
            call.client.open_calls += 1
            call.client.enqueued -= 1
    elif was is _COMPILING:
        assert call.held is not None
        del call.held.among[call]
        call.held = None
    call.state, call.worker = to, worker
    if worker is not None:
        if to is _RUNNING:
            worker.running.append(call)
        elif to is _WAITING:
            worker.waiting.append(call)
        else:
            (worker.enqueued if to is _ENQUEUED else worker.graph_slots)[call.dispatch] = call
            call.was_answered = True
            call.client.open_calls -= 1
            call.client.enqueued += 1
    elif to is _CLOSED:
        call.client.open_calls -= 1
    elif to is _COMPILING:
        assert call.held is not None
        call.held.among[call] = call.held


def take(calls: Iterable[Call]) -> list[Call]:
    """All of these are in hand now. Returns them in their order."""
    taken = list(calls)
    for call in taken:
        move(call, _IN_HAND)
    return taken
