"""Looks at the pages that clients and workers share, as the server takes them."""

from __future__ import annotations

import math

from tests.simulation.model import Call, Dispatch, Lane, Stream
from tests.simulation.workers import Process

from layerzero.broker.core import events as ev
from layerzero.broker.io.page_poller import AWAITED_LOOK_S, POLL_S
from layerzero.ipc.shm.timeline_words import TimelinePoint


class Pages:
    """World's looks at them."""

    def plan_look(self) -> None:
        is_awaited = self.state.is_awaited
        rings = {lane.number: lane for lane in self.lanes.values() if lane.is_open and lane.ring}
        has_calls = any(process.enqueued or self._busy_graph_slots(process) for process in self.processes.values())
        if is_awaited or has_calls or any(self._on_ring(lane) for lane in rings.values()):
            at_s = self.now_s + (AWAITED_LOOK_S if is_awaited or self._is_stopping else POLL_S)
            if at_s < self._poll_at_s:
                self._poll_at_s = at_s
                self.push(at_s, self._look, at_s)

    def _look(self, at_s: float) -> None:
        if at_s == self._poll_at_s:
            self._poll_at_s = math.inf
            self.poll_timelines()
            self.look_at_rings()
            bound = {n: one for process in self.processes.values() for n, one in process.bound.items()}
            if bound or self.state.graph_slots.is_awaited:
                self._deliver(ev.GraphSlotsPolled(self._see_graph_slots()))
            self.plan_look()

    def _see_graph_slots(self) -> dict[int, int]:
        """Those that are busy. The others' calls start anew: what was tried for one replay is over."""
        busy = {n: word for process in self.processes.values() for n, word in self._busy_graph_slots(process).items()}
        for process in self.processes.values():
            for number, dispatch in process.bound.items():
                if number not in busy:
                    dispatch.call.forgive()
        return busy

    @staticmethod
    def _busy_graph_slots(process: Process) -> dict[int, int]:
        if not process.bound:
            return {}
        graph_slots = {n: d.call.client.graph_slots[d.call.graph_slot or 0] for n, d in process.bound.items()}
        return {number: graph_slot.word for number, graph_slot in graph_slots.items() if graph_slot.is_busy}

    def _on_ring(self, lane: Lane) -> list[int]:
        """Calls on it whose points are not done."""
        return [n for n, one in lane.slots.items() if (t := one.point) and self._stream_of(lane, t).done < t.value]

    @staticmethod
    def _stream_of(lane: Lane, point: TimelinePoint) -> Stream:
        assert lane.client is not None
        return lane.client.streams[point.timeline]

    def _look_on(self, lane: Lane) -> ev.RingSnapshot:
        calls = [lane.slots[number] for number in self._on_ring(lane)]
        ready = {one.call for one in calls if self._stream_of(lane, one.point).ready >= one.point.value}
        return ev.RingSnapshot(lane.calls, lane.done, calls, ready)

    def look_at_rings(self) -> None:
        if self.device:
            rings = [lane for lane in self.lanes.values() if lane.is_open]
            if rings:
                looks = {lane.number: self._look_on(lane) for lane in rings}
                self._deliver(
                    ev.RingsPolled(looks, {(p.backend, p.generation): p.page[0] for p in self.processes.values()})
                )

    def poll_timelines(self, only: Process | None = None) -> None:
        """What timeline pages say."""
        for process in [p for p in self.processes.values() if (p.enqueued or p is only) and only in (None, p)]:
            done, ready = [], set()
            unanswered = {d.number: d for d in process.sent if process is only and d.call.point is not None}
            for number, dispatch in {**process.enqueued, **unanswered}.items():
                call, stream = dispatch.call, self.stream(dispatch.call)
                assert call.point is not None
                if stream.done >= call.point.value:
                    done.append(number)
                elif stream.ready >= call.point.value:
                    ready.add(number)
            for number in done:
                if number in unanswered:
                    process.sent.remove(unanswered[number])
                    call = unanswered[number].call
                else:
                    call = process.enqueued.pop(number).call
                assert call.point is not None
                call.client.pending.pop(call.point, None)
            seen = ev.TimelinesPolled(process.backend, process.generation, done, ready)
            if only is None:
                self._deliver(seen)
            elif self.device:
                self._handle(seen)  # what is said of a worker that has ended is complete with its exit
        clients = {client.number: client for client in self.clients.values()}
        streams = {key: clients[key[0]].streams[key[2].timeline] for key in self.state.points.held if only is None}
        reached = [key for key, stream in streams.items() if stream.ready >= key[2].value]
        if reached:
            self._deliver(ev.PointsReached(reached))

    def stream(self, call: Call) -> Stream:
        assert call.point is not None
        return call.client.streams[call.point.timeline]

    def pump_gpus(self) -> None:
        for process in self.processes.values():
            if process.is_alive:
                process.pump_gpu()

    def point_done(self, dispatch: Dispatch) -> None:
        """The worker's stream writes the word."""
        call, stream = dispatch.call, self.stream(dispatch.call)
        assert call.point is not None
        is_next = call.point.value == stream.done + 1 or (call.client.has_left and call.point.value > stream.done)
        self.require(is_next, "points of a lane are done out of order")
        call.is_done = dispatch.is_over = True
        stream.done, stream.since_s = call.point.value, self.now_s
        self.push(self.now_s + self.delay_s(), call.client.advance, stream)
