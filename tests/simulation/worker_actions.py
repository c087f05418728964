"""What the server does for workers; a promise that an action breaks is a Violation."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.backends import COMPILES, GPU, passed_probe
from tests.simulation.coverage import CRASHES
from tests.simulation.model import STREAMS, Call, Dispatch
from tests.simulation.workers import Process

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.quarantine import MAX_DEATHS_PER_CALL
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities.compile_unit import Unit, unit_of
from layerzero.ipc.errors import EnvChanged, EnvError
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import Lease, decode
from layerzero.ipc.vocabulary.worker_codes import LANE_CALL, mark

STOP_GRACE_S = 5.0


class WorkerActions:
    """World as the server that workers know."""

    def _probe(self, action: act.Probe) -> None:
        backend = action.backend
        fails = backend in self._missing or (not self.is_calm and self.rng.random() < self._p_probe_fails)
        self.push(self.now_s + self.rng.uniform(0.0, 0.5), self._probed, backend, fails)

    def _probed(self, backend: str, fails: bool) -> None:
        if self.state.workers[backend].state is WorkerState.PROBING:
            if fails:
                self._is_broken[backend] = "probe"
            self._restart_from_s.pop(backend, None)
        error = EnvError("no module named lib", env=backend) if fails else None
        self._deliver(ev.ProbeEnded(backend, error, None if fails or not self.compiles else passed_probe(backend)))

    def _compile(self, action: act.Compile) -> None:
        backend, unit = action.backend, action.unit
        self.require(backend not in self._compiling, "a backend compiles two things at a time")
        self.require(not self._compiled.get(unit), "something is compiled twice")
        self.require(backend in COMPILES and self.compiles, "something is compiled that need not be")
        self.require(not self._is_stopping, "something is compiled during the shutdown")
        self._compiling[backend] = unit
        fails = not self.is_calm and self.rng.random() < self._p_compile_fails
        self.push(self.now_s + self.rng.uniform(0.0, self._compile_s), self._compile_ended, backend, unit, fails)

    def _compile_ended(self, backend: str, unit: Unit, fails: bool) -> None:
        del self._compiling[backend]
        self._compiled[unit] = not fails
        self.coverage.fates["compile_failed" if fails else "compiled"] += 1
        self._deliver(ev.CompileEnded(backend, unit, "nvcc: error" if fails else "", 1.0))

    def _is_compiled(self, backend: str, call: Call) -> bool | None:
        """False when that has failed, None when it is not over."""
        if not self.compiles or backend not in COMPILES:
            return True
        spec = CallSpec.parse(call.signature.body)
        return self._compiled.get(unit_of(f"{backend}.{spec.op}", ["dtypes"], spec))

    def _spawn(self, action: act.Spawn) -> None:
        backend, generation = action.backend, action.generation
        is_main = self.state.workers[backend].generation == generation
        draining, successors = self.state.lifecycle.succession.draining, self.state.lifecycle.succession.successors
        others = [
            p
            for p in self.processes.values()
            if p.backend == backend and not p.is_over and (backend, p.generation) not in draining
        ]
        if not is_main:  # it is to take over from one that serves
            self.require(successors[backend].generation == generation, "two workers are to take over from one")
            others = [p for p in others if p.generation != self.state.workers[backend].generation]
            self.coverage.fates["successor"] += 1
        elif backend in successors:  # that has failed, and is being killed
            others = [p for p in others if p.generation != successors[backend].generation]
        self.require(not others, f"{backend} is spawned while its worker before is not known to be dead")
        if self._is_broken.get(backend) == CRASHES:
            del self._is_broken[backend]
            self.coverage.fates["tried_again"] += 1
        self.require(backend not in self._is_broken, f"{backend} is restarted in spite of: {self._is_broken}")
        self.require(self.now_s >= self._restart_from_s.get(backend, 0.0), f"{backend} is restarted without back-off")
        if not self.is_calm and self.rng.random() < self._p_spawn_fails:
            if is_main:
                self._is_broken[backend] = "spawn"
            self._handle(ev.SpawnFailed(backend, generation, EnvChanged("a file has changed", env=backend)))
            return
        self._pids += 1
        process = self._new_process(backend, generation, self._pids)
        self.processes[backend, generation] = self._by_identity[process.identity] = process
        self._handle(ev.WorkerSpawned(backend, generation, process.pid))
        self.push(self.now_s + self.rng.uniform(0.0, 1.0), process.load)

    def kill(self, process: Process) -> None:
        self.push(self.now_s + self.delay_s(), process.die, -9)

    def _kill(self, action: act.Kill) -> None:
        process = self.processes[action.backend, action.generation]
        event = self._event
        is_overdue = isinstance(event, ev.LaneOverdue | ev.RingsPolled | ev.GraphSlotsPolled)
        is_deadline = is_overdue or (type(event) is ev.Tick and process.was_ready)
        self.require(not process.kill_reason, "a worker is killed twice")
        is_silent = isinstance(event, ev.WorkerMisbehaved) and event.is_silent
        is_spared = isinstance(event, ev.WorkerSpared)
        self.require(not (is_spared and process.sent), "a worker that has calls is sent to rest")
        is_forced = isinstance(event, ev.RestartAsked)
        reasons = {"forced": is_forced, "deadline": is_deadline, "silent": is_silent, "rest": is_spared}
        process.kill_reason = next((reason for reason, is_it in reasons.items() if is_it), "fault")
        self.coverage.fates["rested"] += is_spared
        process.is_too_late = type(event) is ev.Tick and not process.was_ready
        worker = self.state.lifecycle.current(action.backend, action.generation)
        assert worker is not None
        late = worker.enqueued.get(worker.blame.dispatch) or worker.graph_slots.get(worker.blame.dispatch)
        process.killed_during = self._events
        if isinstance(event, ev.LaneOverdue):
            process.killed_for = mark(event.lane, event.call)
        elif isinstance(event, ev.RingsPolled):
            process.killed_for = worker.blame.mark
            self.coverage.fates["ring_late"] += 1
            (late_one,) = (
                one
                for lane in self.lanes.values()
                for number, one in lane.ring.items()
                if one.number == process.killed_for and number not in lane.left
            )
            point, stream = late_one.call.point, self.stream(late_one.call)
            assert point is not None
            is_in_gpu = stream.done + 1 == point.value <= stream.ready or late_one.call.client.has_left
            is_long = self.now_s - stream.since_s >= self.limits.timeout_s - 1e-9
            is_in_cpu = process.page[0] == late_one.number
            is_in_cpu &= self.now_s - process.began_s >= self.limits.timeout_s - 1e-9
            is_late = (is_in_gpu and is_long) or is_in_cpu
            self.require(is_late, "a worker is killed for a call of a ring that is not late")
        elif is_deadline and process.page[0] & LANE_CALL and late is None:
            process.killed_for = process.page[0]
            is_long = self.now_s - process.began_s >= self.limits.timeout_s - 1e-9
            self.require(is_long, "a worker is killed for a head that waits for a call of a lane")
        elif late is not None:
            if late.graph_slot is not None:
                self.coverage.fates["graph_slot_late"] += 1
                process.late = process.bound[late.dispatch]
                process.late.call.faults.add("deadline")
                graph_slot = process.late.call.client.graph_slots[late.graph_slot]
                is_long = graph_slot.is_busy and self.now_s - graph_slot.since_s >= self.limits.timeout_s / 2 - 1e-9
                self.require(is_long, "a worker is killed for a graph slot that is not late")
                self.kill(process)
                return
            self.coverage.fates["point_late"] += 1
            process.late = process.enqueued[late.dispatch]
            process.late.call.faults.add("deadline")
            stream = self.stream(process.late.call)
            assert process.late.call.point is not None
            is_next = process.late.call.point.value == stream.done + 1
            is_in_gpu = is_next or process.late.call.client.has_left
            is_long = self.now_s - max(stream.since_s, process.late.answered_s) >= late.timeout_s - 1e-9
            self.require(is_in_gpu and is_long, "a worker is killed for a call that its GPU has not had for so long")
        elif process.sent and not is_forced:
            process.sent[0].call.faults.add(process.kill_reason)
        self.kill(process)

    def _stop(self, action: act.StopWorker) -> None:
        process = self.processes[action.backend, action.generation]
        if action.identity:
            process.send("stop")
            self.push(self.now_s + STOP_GRACE_S, process.die, -9)
        else:
            self.kill(process)

    def _retire(self, action: act.RetireWorker) -> None:
        process = self._worker(action.identity, "Retire")
        self.require(not process.sent and not process.enqueued, "a worker that has calls is told to exit")
        self.require(self.state.workers[action.backend].generation > action.generation, "nobody has taken over")
        process.is_told = True
        self.coverage.fates["retired"] += 1
        process.send("stop")

    def _worker(self, identity: bytes, what: str) -> Process:
        process = self._by_identity.get(identity)
        self.require(process is not None and not process.is_over, f"{what} to a worker that is dead")
        assert process is not None
        return process

    def _prepare(self, action: act.SendPrepare) -> None:
        process = self._worker(action.identity, "Prepare")
        process.prepared.add(action.plan)
        process.send("prepare", action.plan)

    def _drop(self, action: act.SendDrop) -> None:
        process = self._worker(action.identity, "Drop")
        self.require(action.plan in process.prepared, "Drop of a plan that the worker never got")
        process.prepared.discard(action.plan)
        process.send("drop", action.plan)

    def _lend(self, action: act.GrantArena) -> None:
        process, arena = self.processes[action.backend, action.generation], (action.client, action.arena)
        self.require(not process.is_confirmed_dead, "an arena is lent to a dead worker")
        self.require(arena in self._arenas, "an arena is lent that the broker closed")
        process.lent.add(arena)
        process.tell("map", arena)

    @staticmethod
    def _is_used(arena: tuple[int, int], process: Process) -> bool:
        """By a call of which the broker must know. From what is on a ring a client that offends may take its own memory
        away; the worker lets go of it once the GPU is through."""
        known = (d for d in process.held if d.lane is None or not d.call.client.has_offended)
        return any(arena in d.arenas for d in known)

    def _take_back(self, action: act.TakeBackArena) -> None:
        process, arena = self.processes[action.backend, action.generation], (action.client, action.arena)
        self.require(not process.is_confirmed_dead, "an arena is taken back from a dead worker")
        self.require(not self._is_used(arena, process), "an arena is taken back while a call uses it")
        process.lent.discard(arena)
        process.tell("unmap", arena)

    def _tell_client_left(self, action: act.TellClientLeft) -> None:
        process = self.processes[action.backend, action.generation]
        self.require(not process.is_confirmed_dead, "a dead worker is told of a client's end")
        open_calls = [d for d in process.held if d.call.client.number == action.client]
        self.require(not open_calls, "a worker is told that a client has left while it has a call of it")

    def _lend_gpu(self, action: act.GrantGpu) -> None:
        process = self.processes[action.backend, action.generation]
        self.require(not process.is_confirmed_dead, "a GPU is lent to a dead worker")
        self.require(action.gpu == GPU and action.client not in process.gpus, "a worker is told twice of a GPU")
        taken = {p.slot for p in self.processes.values() if p is not process}
        self.require(action.slot > 0 and action.slot not in taken, "two starts of workers have one slot")
        process.slot = action.slot
        process.gpus.add(action.client)
        for lane in range(STREAMS):
            process.last_points.pop((action.client, lane), None)
        process.no_transport.discard(action.client)
        if not self.is_calm and self.rng.random() < self._p_no_transport:
            self.coverage.fates["deaf"] += 1
            process.no_transport.add(action.client)

    def _take_back_gpu(self, action: act.TakeBackGpu) -> None:
        process = self.processes[action.backend, action.generation]
        self.require(not process.is_confirmed_dead, "a GPU is taken back from a dead worker")
        self.require(action.client in process.gpus, "a GPU is taken back that was not lent")
        process.gpus.discard(action.client)

    def _close_gpu(self, action: act.CloseGpu) -> None:
        client = next(c for c in self.clients.values() if c.number == action.client)
        held = [d for p in self.processes.values() for d in p.held if d.call.client is client]
        self.require(client.has_left and not held, "a timeline page is closed that a worker needs")
        client.has_gpu = False

    def _fail_point(self, action: act.FailTurn) -> None:
        client = next(c for c in self.clients.values() if c.number == action.client)
        if client.has_left:
            self.require(client.left_during == self._events, "the point of a client that has left fails")
            return
        stream = client.streams[action.point.timeline]
        call = stream.calls.get(action.point.value)
        is_stale = call is None or action.point.value <= stream.done
        if (is_stale and client.has_offended) or ((call is None or is_stale) and self.exits):
            return  # its offence was not even looked at; or it came when the broker had ended its stream
        self.require(call is not None, "a point fails that was not taken")
        assert call is not None
        is_last = isinstance(self._event, ev.WorkerExited | ev.SpawnFailed | ev.ShutdownAsked) and self._is_stopping
        is_next = action.point.value == stream.done + 1 <= stream.ready
        self.require(is_next or is_last, "a point fails before its client's stream has come to it")
        self.require(not call.is_done, "a point fails that is done")
        self.require(all(d.is_over for d in call.dispatches), "a point fails that a worker may finish")
        self.coverage.fates["point_failed"] += 1
        self.coverage.fates["point_held"] += type(self._event) is ev.PointsReached
        call.has_failed = True
        stream.done, stream.since_s = action.point.value, self.now_s
        self.push(self.now_s + self.delay_s(), client.advance, stream)

    def _release_point(self, action: act.ReleaseTurn) -> None:
        client = next(c for c in self.clients.values() if c.number == action.client)
        self.require(client.has_left, "inputs count as ready although their client is there")
        self.coverage.fates["point_released"] += 1
        stream = client.streams[action.point.timeline]
        held = [d.call.point for p in self.processes.values() if p.is_alive for d in p.held if d.call.client is client]
        held += [
            one.call.point
            for lane in self.lanes.values()
            if lane.client is client and lane.process.is_alive
            for number, one in lane.ring.items()
            if number > lane.done and not lane.is_taken_back
        ]
        open_points = [point.value for point in held if point is not None and point.timeline == action.point.timeline]
        is_first = not any(stream.done < number < action.point.value for number in open_points)
        self.require(is_first, "inputs count as ready before what comes before is done")
        if stream.ready < action.point.value:
            stream.ready, stream.since_s = action.point.value, self.now_s
        self.pump_gpus()

    def _allow(self, action: act.SendAllow) -> None:
        process = self._worker(action.identity, "Allow")
        self.require(self.limits.express, "a lane is used although lanes are off")
        lane = self.lanes[action.lane]
        self.require(lane.process is process, "a lane leads to two workers")
        is_known = action.plan in process.prepared or lane.is_taken_back
        self.require(is_known, "a plan is allowed that the worker never got")
        process.send("allow", (action.lane, action.plan))

    def _lease(self, action: act.SendLease) -> None:
        lease = decode(action.body, Lease)
        lane, client = self.lanes[lease.lane], self.clients[action.identity]
        route = self.state.clients[client.identity].routes.get(action.route) if not client.has_left else None
        if self._to_client(action.identity) is None:
            return
        decision = client.decisions.get(action.decision)
        self.require(decision is not None, "a lease before its decision")
        assert decision is not None
        self.require(route is not None, "a lease for a route that was forgotten")
        assert route is not None
        if not self._is_nested:
            best = next(iter(self.state.signatures.order(replace(route.signature))), None)
            is_best = best is not None and best.kernel_id == decision.kernel_id
            self.require(is_best and not lane.process.kill_reason, "a lease for what would not be chosen again")
            until_s = [at_s for key, at_s in self._quarantine.items() if key[0] == route.signature.key]
            self.require(max(until_s, default=0.0) <= self.now_s, "a lease for calls that must show a digest")
            is_wide = bool(lease.neighbours) and any(at_s > self.now_s for at_s in self._quarantine.values())
            self.require(not is_wide, "a lease for neighbours that may be poison")
            self.require(not self._is_stopping, "a lease during the shutdown")
        lane.granted[action.route] = (lease.epoch, self.state.engine.epoch, decision.kernel_id)
        lane.stale_since_s.pop(action.route, None)
        client.inbound.send(client.leased, action.route, lease)

    def _lend_lane(self, action: act.GrantLane) -> None:
        lane, process = self.lanes[action.lane], self.processes[action.backend, action.generation]
        self.require(lane.is_open and not lane.is_ended, "a lane is lent that is not open")
        self.require(lane.process is process and not process.is_confirmed_dead, "a lane is lent to a dead worker")
        process.tell("map_lane", lane)

    def _revoke_lane(self, action: act.RevokeLane) -> None:
        lane = self.lanes[action.lane]
        self.require(action.epoch >= lane.core_epoch, "the epoch of a lane goes back")
        lane.core_epoch = action.epoch
        if lane.is_open:
            lane.epoch = action.epoch

    def _take_back_lane(self, action: act.TakeBackLane) -> None:
        lane, process = self.lanes[action.lane], self.processes[action.backend, action.generation]
        self.require(lane.process is process and not process.is_confirmed_dead, "a dead worker is told of a lane")
        assert lane.client is not None
        self.require(lane.client.has_left, "a lane is taken back from a client that is there")
        if lane.ring:
            self.coverage.fates["ring_survived_client"] += 1
            self.require(lane.left >= set(self._on_ring(lane)), "a ring is taken back with calls on it")
        lane.is_taken_back, lane.is_open = True, False
        process.tell("unmap_lane", lane)

    def _end_lane(self, action: act.EndLane) -> None:
        lane, event = self.lanes[action.lane], self._event
        client = lane.client
        assert client is not None
        if isinstance(event, ev.LaneOpened) and event.identity != client.identity:
            return  # an impostor's page
        self.require(lane.process.is_confirmed_dead, "a lane ends while its worker may run")
        self.coverage.fates["lane_ended_unopened"] += not lane.is_open
        lane.is_ended, lane.is_open = True, False
        if self.device:
            self.push(self.now_s + self.delay_s(), client.ring_ended, lane)
        else:
            self.push(self.now_s + self.delay_s(), client.lane_woken, lane, lane.calls)

    def _close_arena(self, action: act.CloseArena) -> None:
        arena = (action.client, action.arena)
        self.require(arena in self._arenas, "an arena is closed twice")
        used = any(self._is_used(arena, process) for process in self.processes.values())
        self.require(not used, "an arena is closed while a worker may write into it")
        self._arenas.discard(arena)

    def _run(self, action: act.Run) -> None:
        process = self._worker(action.identity, "Run")
        client = next(c for c in self.clients.values() if c.number == action.client)
        places = (action.body, action.point, action.graph_slot)
        was_dropped = client.left_during == self._events  # while this very list of actions was performed
        known = client.left_open if was_dropped else client.open
        call = next((c for c in known.values() if (c.body, c.point, c.graph_slot) == places), None)
        if call is None:
            raise AssertionError("Run of a call that is not open")
        arenas = frozenset((action.client, ref.arena) for ref in wire.unpack_refs(action.body, 2))
        is_killed = bool(process.kill_reason) and process.killed_during != self._events
        self.require(not is_killed, "Run to a worker that is being killed")
        self.require(action.plan in process.prepared, "Run without Prepare")
        self.require(not self.device or action.client in process.gpus, "Run on a GPU that the worker was not told of")
        self.require(not call.is_done, "a call that is done runs again")
        self.require(arenas <= process.lent, "Run on arenas that were not lent")
        self.require(all(d.is_over for d in call.dispatches), "a call is dispatched again before its worker is done")
        self.require(call.deaths < MAX_DEATHS_PER_CALL, f"a call that killed {call.deaths} workers gets another")
        if process.backend in call.died_on:
            self.require(not call.signature.pinned, "a pinned call is run again where it failed")
            self.coverage.fates["went_back"] += 1
        else:
            self.require(process.backend not in call.failed_on, "a call is run again where it failed")
        self.require(self._is_compiled(process.backend, call) is True, "a kernel compiles within a call")
        self.require(not call.is_quarantined, "a quarantined call is run")
        self.require(action.attempt == len(call.dispatches) + 1, "attempts are not counted")
        self.require(len(process.sent) < self.limits.depth, "more is sent ahead than allowed")
        dispatch = Dispatch(action.dispatch, action.attempt, call, action.plan, arenas)
        call.dispatches.append(dispatch)
        if not process.sent:
            process.head_since_s = self.now_s
        process.sent.append(dispatch)
        if self.rng.random() < self._p_full:
            self._handle(ev.WorkerMisbehaved(process.backend, process.generation, "it does not read its queue"))
        else:
            process.send("run", dispatch)

    def _mute(self, action: act.SendMute) -> None:
        process = self._worker(action.identity, "Mute")
        self.coverage.fates["graph_slot_muted"] += 1
        both = (*process.sent, *process.bound.values())
        muted = [d for d in both if d.call.graph_slot == action.graph_slot and d.call.client.number == action.client]
        self.require(bool(muted) and muted[-1].plan == action.plan, "a graph slot is muted that is not bound")
        for dispatch in muted:
            dispatch.is_over = True
            process.bound.pop(dispatch.number, None)
        process.send("mute", (action.client, action.graph_slot))
