"""What clients and workers say as it comes to the core."""

from __future__ import annotations

from tests.simulation.backends import ARENA_BYTES, GPU, SLOTS
from tests.simulation.clients import Client
from tests.simulation.model import Call, Dispatch, Lane
from tests.simulation.workers import Process

from layerzero.broker.core import events as ev
from layerzero.ipc.shm.counter_words import BUCKETS, Growth, Label
from layerzero.ipc.vocabulary.worker_codes import mark


class Arrivals:
    """World's inbound side."""

    def gpu_offered(self, client: Client, has_new_page: bool) -> None:
        if not client.has_left and not self.state.graph_slots.holds(client.identity, GPU):  # the server refuses it
            self.coverage.fates["offered_again"] += not has_new_page
            self.poll_timelines()
            self._deliver(ev.GpuOffered(client.identity, GPU, has_new_page))

    def from_client(self, client: Client, event: ev.Event, call: Call | None = None) -> None:
        """By ZeroMQ; the server passes nothing on for a client that has gone."""
        if client.has_left:
            return
        if call is not None:
            self._note_arrival(client, call)
            call.since_s, call.has_arrived = self.now_s, True
            call.is_crowded = self.state.clients[client.identity].open_calls >= self.limits.max_in_flight
            if call.after[0]:
                self._count_lost(call, self.lanes[call.after[0]])
        elif isinstance(event, ev.CallUnbound):
            client.open.pop(event.seq, None)
        elif isinstance(event, ev.CallPoisoned):
            route = self.state.clients[client.identity].routes.get(event.route)
            if route is not None:
                key = (route.signature.key, event.digest)
                self._quarantine[key] = self.now_s + self.limits.poison_quarantine_s
        self._deliver(event)

    def _note_arrival(self, client: Client, call: Call) -> None:
        """The broker has it now."""
        client.open[call.seq] = call
        if call.point is not None:
            client.pending[call.point] = call
        if self.device:
            key = (client.number, GPU)
            call.no_transport = {b for b in self.able(call) if key in self.state.workers[b].no_transport}
        until_s = self._quarantine.get((call.signature.body, call.digest), 0.0)
        call.is_quarantined = until_s > self.now_s

    def _count_lost(self, call: Call, lane: Lane) -> None:
        """It comes from a lane that ended: one attempt more, and perhaps a death."""
        process = lane.process
        call.dispatches.append(Dispatch(lane.blamed, 1, call, 0, frozenset(), lane, is_over=True))
        if lane.blamed == mark(*call.after):
            self.coverage.fates["lane_blamed"] += 1
            call.fail_on(process.backend, process.kill_reason)
            if process.kill_reason:
                call.faults.add(process.kill_reason)

    def lane_offered(self, client: Client, lane: Lane) -> None:
        """By the control socket; the server itself refuses a lane that it has."""
        if client.has_left or lane.is_open:
            return
        if lane.client is client:
            lane.is_open = True
            self.coverage.fates["lane_opened_late"] += lane.core_epoch > 0
        self._deliver(ev.LaneOpened(client.identity, lane.number, self.device))
        if lane.is_open and not lane.is_taken_back:
            self.require(lane.epoch == lane.core_epoch, "a lane opens with leases that were taken back")
        client.inbound.send(client.lane_added, lane)

    def lane_overdue(self, client: Client, lane: Lane, number: int) -> None:
        """By ZeroMQ; the server passes on what the page confirms."""
        if not client.has_left and lane.is_open and lane.done < number and lane.dispatch is not None:
            self.coverage.fates["lane_overdue"] += 1
            call = lane.dispatch.call
            self._deliver(ev.LaneOverdue(client.identity, lane.number, call.route, call.timeout_s, number))

    def lane_done(self, lane: Lane, status: str) -> None:
        """The worker writes the end of a call into the page, and rings."""
        assert lane.client is not None
        assert lane.dispatch is not None
        lane.done, lane.status, lane.dispatch.is_over = lane.calls, status, True
        self.push(self.now_s + self.delay_s(), lane.client.lane_woken, lane, lane.calls)
        if self.rng.random() < 0.3:
            self.push(self.now_s + self.rng.uniform(0.0, 1.0), self._look_at, lane)

    def _look_at(self, lane: Lane) -> None:
        calls = lane.done - lane.seen
        if lane.is_open and calls:
            lane.seen = lane.done
            plan = lane.dispatch.plan if lane.dispatch is not None and lane.status == "ran" else 0
            plan = lane.ring[lane.done].plan if lane.ring else plan
            self._deliver(ev.LanePolled(lane.number, calls, plan, self.rng.randrange(1000, 10**6)))

    def counters_seen(self, client: Client) -> None:
        """The client has left: its page is read."""
        calls = client.number
        grown = Growth(Label("silu", "nobody", "express"), [calls] + [0] * (BUCKETS - 1), 1000 * calls, 0, {}, {})
        self._deliver(ev.CountersPolled(client.number, [("nobody", grown)]))

    def arena_offered(self, client: Client, arena: int) -> None:
        if not client.has_left:
            self._arenas.add((client.number, arena))
            self._deliver(ev.ArenaOffered(client.identity, arena, ARENA_BYTES, self.device))
            client.inbound.send(self._arena_added, client, arena)

    def _arena_added(self, client: Client, arena: int) -> None:
        client.arenas.append(arena)
        client.free += [(arena, index) for index in range(SLOTS)]

    def arena_retired(self, client: Client, arena: int) -> None:
        if not client.has_left:
            self.poll_timelines()
            self._deliver(ev.ArenaGivenUp(client.identity, arena))

    def client_gone(self, client: Client) -> None:
        if client.identity in self.clients and not client.has_left:
            if client.number % 3 == 0:  # the others make no calls that pass the broker by
                self.counters_seen(client)
            self._leave(client)
            self._deliver(ev.ClientLeft(client.identity))

    def _leave(self, client: Client) -> None:
        self.coverage.fates["lane_left"] += any(lane.dispatch is not None for lane in client.lanes())
        client.has_left = client.has_hung_up = True
        client.left_during = self._events
        client.left_open = dict(client.open)
        client.open.clear()
        client.pending.clear()

    def from_worker(self, process: Process, event: ev.Event) -> None:
        is_heard = not process.is_confirmed_dead and not process.kill_reason
        if isinstance(event, ev.CallRan | ev.CallRaised):
            head = process.sent[0] if process.sent else None
            if is_heard and head is not None and (head.number, head.attempt) == (event.dispatch, event.attempt):
                process.sent.popleft()
                process.head_since_s = self.now_s
                if head.call.graph_slot is not None and isinstance(event, ev.CallRan):
                    if head.call.seq in head.call.client.open or head.call.client.has_left:
                        process.bound[head.number] = head
                    else:  # its client wants it no more
                        head.is_over = True
                elif self.device and isinstance(event, ev.CallRan):
                    process.enqueued[head.number] = head
                    head.answered_s = self.now_s
                else:
                    head.is_over = True
                if isinstance(event, ev.CallRaised):
                    head.call.fail_on(process.backend, "raised")
        elif isinstance(event, ev.CallHandedBack):
            lane = self.lanes[event.lane]
            call = lane.ring[event.call.call].call
            if is_heard and lane.number in self.state.leases.lanes:
                lane.left.add(event.call.call)
                if not call.client.has_left:
                    self._note_arrival(call.client, call)
                    if event.error is not None and not self._is_stopping and not call.is_quarantined:
                        call.dispatches.append(lane.ring[event.call.call])
                        call.fail_on(process.backend, "raised")
        elif isinstance(event, ev.WorkerReady) and is_heard and not self._is_stopping:
            process.was_ready, process.ready_s = True, self.now_s
            self._has_served.add(process.backend)
        self._deliver(event)
