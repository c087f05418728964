"""Looks at memory that clients and workers share, to tell the core what happened there without a message: what express
lanes carried, what is on rings, which calls GPUs are done with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from layerzero.broker.core import events as ev
from layerzero.broker.core.leases import Lane
from layerzero.broker.core.model import Worker
from layerzero.broker.core.state import BrokerState
from layerzero.broker.io.lane_pages import LanePages
from layerzero.broker.io.timeline_pages import TimelinePages
from layerzero.broker.io.worker_links import WorkerLinks

POLL_S = 1.0
# Between looks at timeline pages while somebody waits for the broker to see a call's end: most are over within a
# millisecond, and the pauses double for those that are not.
AWAITED_FIRST_S, AWAITED_LOOK_S = 0.0002, 0.02


class PagePoller:
    """`handle` takes what was seen. `stop_if_idle` is asked about the workers whose calls were looked at."""

    def __init__(
        self,
        state: BrokerState,
        handle: Callable[[ev.Event], None],
        links: WorkerLinks,
        lanes: LanePages,
        pages: TimelinePages,
        stop_if_idle: Callable[[Worker], None],
    ) -> None:
        self._state = state
        self._handle = handle
        self._links = links
        self._lanes = lanes
        self._pages = pages
        self._stop_if_idle = stop_if_idle
        self._looked_s = 0.0  # at all timeline pages
        self._pause_s = AWAITED_FIRST_S  # until the next look, while somebody waits

    @property
    def has_silent(self) -> bool:
        """Whether there may be calls that wake nobody here."""
        return bool(self._lanes) or any(worker.graph_slots for worker in self._state.lifecycle.succession.all())

    @property
    def due_s(self) -> float:
        """When to look at timeline pages next."""
        if not self._pages:
            return math.inf
        is_awaited = self._state.is_awaited
        if not is_awaited and not any(worker.enqueued for worker in self._state.lifecycle.succession.all()):
            return math.inf
        if is_awaited:
            return self._looked_s + self._pause_s
        return self._looked_s + (AWAITED_LOOK_S if self._state.stopping else POLL_S)

    def at_lanes(self) -> None:
        """Count the calls that did not pass through here."""
        for seen in list(self._lanes.seen()):
            self._handle(seen)

    def at_rings(self, executing: Callable[[], Mapping[tuple[str, int], int]] | None = None) -> None:
        """`executing`: as of RingsPolled."""
        page_poller = self._rings(self._state.leases.rings())
        if page_poller:  # what a worker is in is asked after what it has taken
            self._handle(ev.RingsPolled(page_poller, None if executing is None else executing()))

    def at_graph_slots(self) -> None:
        calls = [call for worker in self._state.lifecycle.succession.all() for call in worker.graph_slots.values()]
        if calls or self._state.graph_slots.is_awaited:
            self._handle(ev.GraphSlotsPolled(self._pages.busy_graph_slots(calls)))

    def at_points(self) -> None:
        """See which calls GPUs are done with."""
        for worker in list(self._state.lifecycle.succession.all()):
            self.at_points_of(worker)
        self._looked_s = time.monotonic()
        reached = self._pages.reached(self._state.points.held)
        if reached:
            self._handle(ev.PointsReached(reached))
        is_over = bool(reached) or not self._state.is_awaited
        self._pause_s = AWAITED_FIRST_S if is_over else min(2 * self._pause_s, AWAITED_LOOK_S)
        if self._state.is_awaited:
            self.at_rings()
            self.at_graph_slots()

    def at_points_of(self, worker: Worker, *, has_ended: bool = False) -> None:
        """Of one worker; of one that has ended also those that it has not answered."""
        calls = [*worker.enqueued.values(), *(worker.running if has_ended else ())]
        if calls and self._pages:
            done, ready = self._pages.look(calls)
            self._handle(ev.TimelinesPolled(worker.backend, worker.generation, done, set(ready)))
            if self._state.stopping:
                self._stop_if_idle(worker)

    def at_what_is_left(self, worker: Worker) -> dict[int, ev.RingSnapshot]:
        """A worker has ended: see all that it did. Returns what is on its rings."""
        self.at_lanes()
        rings = self._state.leases.rings(worker)
        for ring in rings:  # first: what a client puts after it has seen this, it brings here itself
            self._lanes.tell_end(ring.number)
        self.at_points()  # in which of its calls the GPU was depends on those before them, whoever had these
        self.at_points_of(worker, has_ended=True)
        page_poller = self._rings(rings)
        self.at_graph_slots()
        return page_poller

    def _rings(self, rings: Iterable[Lane]) -> dict[int, ev.RingSnapshot]:
        page_poller = {}
        for ring in rings:
            gpu = self._pages.get(ring.client.number, ring.gpu)
            look = self._lanes.look(ring.number, gpu.page) if gpu is not None else None
            if look is not None:
                page_poller[ring.number] = look
            if ring.client.has_left and self._lanes.is_unheard(ring.number):
                self._links.wake(ring.worker.backend, ring.generation)
        return page_poller
