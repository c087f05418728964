"""Promises about the whole, looked at after every event."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from tests.simulation.clients import Client
from tests.simulation.coverage import CRASHES
from tests.simulation.model import Call
from tests.simulation.workers import Process

from layerzero.broker.core.lease_policy import WATCH_S
from layerzero.broker.core.leases import MAX_LOST
from layerzero.broker.core.replacements import RETIRE_GRACE_S
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.io.page_poller import POLL_S
from layerzero.ipc.vocabulary.worker_codes import LANE_CALL

LATE_S = 0.2  # a tick may be that late


class Checks:
    """World's promises."""

    def _check(self) -> None:
        state, now_s = self.state, self.now_s
        self._check_lanes()
        sent_of, held_of = self._at_workers()
        for client in self.clients.values():
            known = state.clients.get(client.identity)
            self.require((known is None) == client.has_left, "the core and the server disagree on who is there")
            if known is not None:
                busy = sum(
                    point.call is None for point in state.points.of(known)
                )  # refused as they came, and held back
                sent = sent_of.get(client, ())
                unwanted = sum(call.graph_slot is not None and call.seq not in client.open for call in sent)
                if known.open_calls + busy != len(client.open) + unwanted:
                    self.require(client.has_offended, f"open_calls is {known.open_calls}: {sorted(client.open)}")
                held = held_of[client]
                self.require(known.enqueued == held, f"enqueued is {known.enqueued}, not {held}")
        for held in state.compiling.held:
            self.require(state.wakeup_s <= held.due_s, f"a call waits for {held.unit} for ever")
            self.require(
                held.unit in self._compiling.values() or held.unit not in self._compiled, "it waits for nothing"
            )
        for process in self.processes.values():
            if process.sent and not process.kill_reason and not process.is_confirmed_dead:
                self._check_deadline(process)
            if process.enqueued and not process.kill_reason and not process.is_confirmed_dead:
                self._check_gpu_deadlines(process)
        if self.device:
            self._check_rings()
        succession = state.lifecycle.succession
        for worker in succession.all():
            name = worker.backend
            reason = state.unavailable.get(name)
            due_s = math.inf
            match worker.state:
                case WorkerState.DRAINING:
                    self.require(not worker.waiting, f"calls wait for a worker of {name} that another has replaced")
                    due_s = worker.retired_s + RETIRE_GRACE_S if worker.fault is None else math.inf
                    if worker.running and worker.fault is None:
                        due_s = worker.head_deadline_s
                case WorkerState.READY | WorkerState.KILLING if succession.is_beside(worker):
                    self.require(not (worker.running or worker.waiting), f"calls are at {name}'s successor")
                case WorkerState.READY if worker.is_held:
                    self.require(name in succession.successors, f"{name} gets no calls, and nobody takes over")
                case WorkerState.READY:
                    self.require(reason is None, f"{name} is ready and reported as {reason}")
                    due_s = worker.head_deadline_s if worker.running else math.inf
                    if worker.waiting and len(worker.running) != self.limits.depth:
                        served = {call.client.number for call in worker.running}
                        have_theirs = all(call.client.number in served for call in worker.waiting)
                        self.require(have_theirs, f"calls wait for {name}, which is free")
                case WorkerState.STARTING:
                    due_s = worker.started_s + self.limits.start_timeout_s
                case WorkerState.BACKOFF:
                    due_s = worker.retry_at_s
                    self.require(reason is not None, f"{name} is in back-off and reported as available")
                    longest_s = min((call.timeout_s for call in worker.waiting), default=math.inf)
                    self.require(due_s <= now_s + longest_s, f"a call waits for {name}, which restarts too late for it")
                case WorkerState.KILLING:
                    self.require(reason is not None, f"{name} is being killed and reported as available")
                case WorkerState.DISABLED:
                    self.require(reason is not None and worker.cause is not None, f"{name} is disabled without a cause")
                    self.require(name in self._is_broken, f"{name} is disabled for nothing")
                    self.require(not worker.waiting, f"calls wait for {name}, which is disabled")
                    if self._is_broken[name] == CRASHES:
                        due_s = self._restart_from_s[name]
                case WorkerState.STOPPING if worker.running and worker.fault is None:
                    due_s = worker.head_deadline_s
                case WorkerState.STOPPED:
                    self.require(not worker.waiting, f"calls wait for {name}, which is stopped")
            if state.wakeup_s > due_s:
                self.require(False, f"{name} is due at {due_s:.3f}, the wakeup is at {state.wakeup_s:.3f}")

    def _at_workers(self) -> tuple[dict[Client, list[Call]], Counter[Client]]:
        """Of each client: the calls that workers have been sent, and how many they have enqueued or bound."""
        sent: dict[Client, list[Call]] = {}
        held: Counter[Client] = Counter()
        for process in self.processes.values():
            for dispatch in process.sent:
                sent.setdefault(dispatch.call.client, []).append(dispatch.call)
            for dispatch in (*process.enqueued.values(), *process.bound.values()):
                held[dispatch.call.client] += 1
        return sent, held

    def _check_deadline(self, process: Process) -> None:
        """Of the head. While it waits for a call of a lane, that call's end is near, too."""
        timeout_s = process.sent[0].call.timeout_s
        if process.page[0] & LANE_CALL:
            since_s = max(process.head_since_s, process.began_s)
            limit_s = 2 * timeout_s + self.limits.timeout_s + 2 * LATE_S
            self.coverage.fates["lane_head_waited"] += self.now_s - process.head_since_s > timeout_s + LATE_S
        else:
            since_s, limit_s = max(process.head_since_s, process.lane_end_s), timeout_s + LATE_S
        self.require(self.now_s - since_s <= limit_s + 1e-9, "an attempt outlives its deadline")

    def _check_gpu_deadlines(self, process: Process) -> None:
        """Of what the GPU is in. It takes two looks to see that: one may come between those of two workers."""
        for dispatch in process.enqueued.values():
            call, stream = dispatch.call, self.stream(dispatch.call)
            if call.point is not None and stream.done + 1 == call.point.value <= stream.ready:
                limit_s = call.timeout_s + 2 * POLL_S + LATE_S
                since_s = max(stream.since_s, dispatch.answered_s)
                self.require(self.now_s - since_s <= limit_s + 1e-9, "a call outlives its deadline on the GPU")

    def _check_rings(self) -> None:
        for lane in self.lanes.values():
            if not lane.is_open or lane.process.kill_reason or lane.process.is_confirmed_dead:
                continue
            for number in set(self._on_ring(lane)) - lane.left:
                dispatch = lane.ring[number]
                stream, point = self.stream(dispatch.call), dispatch.call.point
                if point is not None and number <= lane.done and stream.done + 1 == point.value <= stream.ready:
                    since_s = max(stream.since_s, dispatch.taken_s)
                    is_in_time = self.now_s - since_s <= self.limits.timeout_s + 2 * POLL_S + LATE_S + 1e-9
                    self.require(is_in_time or dispatch.is_over, "a call of a ring outlives its deadline")

    def _check_lanes(self) -> None:
        state, now_s = self.state, self.now_s
        for client in state.clients.values():
            self.require(len(client.lost) <= MAX_LOST, "ended lanes are remembered without end")
        in_force = {number for number, lane in self.lanes.items() if not lane.is_ended and not lane.is_taken_back}
        self.require(set(state.leases.lanes) == in_force, "the core and the server disagree on the lanes there are")
        for number in in_force:
            lane = self.lanes[number]
            self.require(not lane.process.is_confirmed_dead, "the lane of a dead worker goes on")
            assert lane.client is not None
            if lane.client.has_left:
                self.require(bool(self.device), "the lane of a client that has left goes on")
                continue
            routes = state.clients[lane.client.identity].routes
            for route, (epoch, core_epoch, kernel_id) in lane.granted.items():
                if route not in routes or epoch != lane.core_epoch:
                    lane.stale_since_s.pop(route, None)
                    continue
                self.require(core_epoch == state.engine.epoch, "a lease outlives its epoch")
                best = next(iter(state.signatures.order(replace(routes[route].signature))), None)
                if best is None or best.kernel_id != kernel_id:
                    since_s = lane.stale_since_s.setdefault(route, now_s)
                    self.require(now_s - since_s <= WATCH_S + LATE_S, "a lease outlives the choice it stands for")
                else:
                    lane.stale_since_s.pop(route, None)

    def _check_nothing_left(self) -> None:
        state, succession = self.state, self.state.lifecycle.succession
        self.require(not self._arenas, f"arenas {sorted(self._arenas)} are never closed")
        left = {
            "clients": state.clients,
            "signatures": state.signatures.known,
            "plans": state.signatures.plans,
            "plans in workers": [w.plans for w in state.workers.values() if w.plans],
            "arenas in workers": [w.arenas for w in state.workers.values() if w.arenas],
            "workers beside others": [*succession.successors, *succession.draining] if not self._is_stopping else [],
            "calls that wait for compilers": state.compiling.held,
            "calls": [w.backend for w in state.workers.values() if w.running or w.waiting],
            "lanes": state.leases.lanes,
            "points": state.points.pages,
            "calls on GPUs": [
                w.backend for w in state.workers.values() if w.enqueued or w.graph_slots or w.gpus or w.no_transport
            ],
            "pages": [c.number for c in self.clients.values() if c.has_gpu and self.device],
            "lanes in workers": [p.backend for p in self.processes.values() if p.is_alive and p.lanes],
        }
        self.require(not any(left.values()), f"something is left behind: { {k: v for k, v in left.items() if v} }")
