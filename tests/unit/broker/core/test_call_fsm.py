"""A call is in one place at a time, and its client's counts say which of its calls are where."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.broker.core.call_fsm import MOVES, CallState, IllegalMove, begin, move, take
from layerzero.broker.core.compile_waits import Held
from layerzero.broker.core.model import Call, Client, Worker

S = CallState
AT_WORKER = {S.WAITING, S.RUNNING, S.ENQUEUED, S.BOUND}


class Table:
    """A client's call and a worker."""

    def __init__(self) -> None:
        no_route: Any = None
        self.client, self.worker = Client(b"C", 1), Worker("alpha")
        self.held: dict[Call, Held] = {}
        self.call = Call(self.client, no_route, 1, 1.0, b"", (), dispatch=7)
        begin(self.call)

    def go(self, to: CallState) -> None:
        if to is S.COMPILING:
            no_unit: Any = None
            self.call.held = Held(self.call, no_unit, 0.0, self.held)
        move(self.call, to, self.worker if to in AT_WORKER else None)

    @property
    def places(self) -> set[CallState]:
        """Where it can be found."""
        worker = self.worker
        found = {
            S.WAITING: list(worker.waiting),
            S.COMPILING: list(self.held),
            S.RUNNING: list(worker.running),
            S.ENQUEUED: list(worker.enqueued.values()),
            S.BOUND: list(worker.graph_slots.values()),
        }
        return {state for state, calls in found.items() if calls == [self.call]}


def reach(state: CallState) -> Table:
    table = Table()
    if state is not S.IN_HAND:
        table.go(state)
    return table


@pytest.mark.parametrize("was", S)
@pytest.mark.parametrize("to", S)
def test_a_move_leaves_one_place_and_enters_another_or_is_refused(was: CallState, to: CallState) -> None:
    """A call that is in two places runs twice; one in none is lost."""
    table = reach(was)
    if to not in MOVES[was]:
        with pytest.raises(IllegalMove, match=f"call 1 of client 1 from {was.name} to {to.name}"):
            table.go(to)
        to = was
    else:
        table.go(to)
    assert table.call.state is to
    assert table.places == {to} - {S.IN_HAND, S.REFUSED, S.CLOSED}
    is_answered = to in (S.ENQUEUED, S.BOUND)
    assert (table.client.open_calls, table.client.enqueued) == (not is_answered and to is not S.CLOSED, is_answered)
    assert table.call.worker is (table.worker if to in AT_WORKER else None)


def test_every_call_can_end() -> None:
    """A state that leads nowhere would hold its call for ever."""
    ends = {S.CLOSED}
    while grown := {state for state in S if state not in ends and MOVES[state] & ends}:
        ends |= grown
    assert ends == set(S)


def test_what_is_taken_is_in_hand_in_its_order() -> None:
    """A dead worker's calls go on in the order in which it had them."""
    table = Table()
    no_route: Any = None
    calls = [Call(table.client, no_route, seq, 1.0, b"", (), dispatch=seq) for seq in (4, 2, 3)]
    for call in calls:
        begin(call)
        move(call, S.RUNNING, table.worker)
    assert take(table.worker.running) == calls
    assert not table.worker.running
    assert {call.state for call in calls} == {S.IN_HAND}
