"""How a worker waits for what comes through shared memory: it looks all the time while something came a moment ago, and
sleeps otherwise: until a doorbell rings, which costs a client and the worker some microseconds, or, because what a GPU
writes wakes nobody, for naps as long as graph slots are bound."""

from __future__ import annotations

import select
import threading
import time

from layerzero.workers.gpu.graph_calls import DOZE_MS, NAP_S, GraphCalls
from layerzero.workers.gpu.rings import Rings

SPIN_S = 0.001  # from the last call on
STRETCH_S = 50e-6  # of looking, then the sockets have their turn: asking them costs microseconds
_LOOKS = 32  # before the clock is asked

Events = list[tuple[int, int]]


class Spin:
    """For the loop's thread."""

    def __init__(self, poll: select.poll, rings: Rings, graph_slots: GraphCalls) -> None:
        self._poll, self._rings, self._graph_slots = poll, rings, graph_slots
        self._until_s = 0.0
        self._fence = threading.Lock()

    def wait(self, timeout_ms: int | None) -> Events:
        """What `poll` says, after this time at the latest, or early. Serves rings and graph slots meanwhile."""
        rings = self._rings
        if not rings and not self._graph_slots:
            return self._poll.poll(timeout_ms)
        now_s = time.monotonic()
        if now_s < self._until_s:
            self._look(now_s + STRETCH_S)
            events = self._poll.poll(0)
        else:
            events = self._sleep(timeout_ms)
        rings.silence(events)
        return events

    def serve(self) -> bool:
        """Some of the calls that there are. Whether there were any."""
        came = self._rings.serve()
        return (bool(self._graph_slots) and self._graph_slots.serve()) or came

    def _look(self, stop_s: float) -> None:
        serve = self.serve if self._graph_slots else self._rings.serve
        while True:
            came = False
            for _ in range(_LOOKS):
                if serve():
                    came = True
            now_s = time.monotonic()
            if came:
                self._until_s = now_s + SPIN_S
            if now_s >= stop_s:
                return

    def _sleep(self, timeout_ms: int | None) -> Events:
        rings = self._rings
        rings.sleep(True)
        try:
            # A client puts its call and then looks whether we sleep; we say so and then look for a call. With a barrier
            # between the two on either side one of us sees the other: taking a lock is one.
            with self._fence:
                pass
            came = self.serve()
            events = self._poll.poll(0) if came else self._rest(timeout_ms)
        finally:
            rings.sleep(False)
        if self.serve() or came:
            self._until_s = time.monotonic() + SPIN_S
        return events

    def _rest(self, timeout_ms: int | None) -> Events:
        if not self._graph_slots:
            return self._poll.poll(timeout_ms)
        if self._graph_slots.is_awake:
            time.sleep(NAP_S)  # poll counts in milliseconds
            return self._poll.poll(0)
        return self._poll.poll(DOZE_MS if timeout_ms is None else min(timeout_ms, DOZE_MS))
