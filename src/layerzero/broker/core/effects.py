"""What the core is at: the time, what must be done for the present event, when to look again, and what it counts."""

from __future__ import annotations

import math

from layerzero.broker.core import actions as act
from layerzero.broker.core.tally import Tally


class Effects:
    """Shared by the core's parts."""

    def __init__(self) -> None:
        self.now_s = 0.0  # of the present event
        self.wakeup_s = math.inf  # the server sends a Tick at this time
        self.stopping = False  # the broker takes no more calls
        self.tally = Tally()
        self.actions: list[act.Action] = []  # that the present event has led to so far

    def emit(self, *actions: act.Action) -> None:
        self.actions += actions

    def wake_by(self, at_s: float) -> None:
        self.wakeup_s = min(self.wakeup_s, at_s)
