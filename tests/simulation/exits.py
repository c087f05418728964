"""Workers' ends as they come to the core, and who must be blamed for them."""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.coverage import CRASHES
from tests.simulation.model import Dispatch
from tests.simulation.workers import Process

from layerzero.broker.core import events as ev
from layerzero.ipc.vocabulary.worker_codes import STICKY_EXIT


class Exits:
    """World's dead workers."""

    def exited(self, process: Process, exit_code: int, page: tuple[int, str]) -> None:
        """Its exit is confirmed, some time after it died."""
        backend = process.backend
        self.poll_timelines()
        process.exit_code = exit_code
        executing = 0 if process.has_renewed else page[0]
        lanes = [lane for lane in self.lanes.values() if lane.process is process]
        for lane in lanes:
            self._look_at(lane)
            lane.blamed = executing if process.has_crashed or process.has_renewed else process.killed_for
            if lane.dispatch is not None:
                lane.dispatch.is_over = True
        heads = list(process.sent)[:1]
        self.poll_timelines(process)
        if heads != list(process.sent)[:1] and process.late is None and not process.killed_for:
            process.late = heads[0]  # it is done after all, and nobody else is to blame
        process.is_confirmed_dead = True
        page_poller = {lane.number: self._look_on(lane) for lane in lanes if lane.is_open and self.device}
        stranded = [
            (one, n in page_poller[lane.number].ready)
            for lane in lanes
            if lane.number in page_poller
            for n, one in lane.ring.items()
            if n not in lane.left and one.call.point in {c.point for c in page_poller[lane.number].calls}
        ]
        stranded = [(one, is_ready) for one, is_ready in stranded if not one.call.client.has_left]
        is_killed = not (process.has_crashed or process.has_renewed)
        wanted = process.killed_for if is_killed else executing if exit_code != STICKY_EXIT else 0
        guilty = next((one for one, _ in stranded if one.number == wanted), None)
        is_sticky = self._lose_enqueued(process, exit_code, executing if process.has_crashed and guilty is None else -1)
        in_running = exit_code != STICKY_EXIT and any(d.number == executing for d in process.sent)
        if guilty is None and not is_sticky and process.has_crashed and not in_running:
            guilty = next((one for one, is_ready in stranded if is_ready), None)
        if self.device:
            self._handle(ev.GraphSlotsPolled(self._see_graph_slots()))
        may_be_graph_slot = not is_sticky and guilty is None and process.has_crashed and not in_running
        is_sticky |= self._lose_bound(process, may_be_graph_slot) or guilty is not None
        self._strand(process, [one for one, _ in stranded], guilty)
        for position, dispatch in enumerate(process.sent):
            dispatch.is_over = True
            is_first = position == 0 and not process.killed_for and process.late is None
            is_blamed = is_first if is_killed else dispatch.number == executing and not is_sticky
            if is_blamed:
                dispatch.call.fail_on(backend, process.kill_reason)
        process.sent.clear()
        self._count_exit(process, exit_code)
        failures = self._failures(backend)
        self._deliver(self._exit_event(process, exit_code, page, page_poller))
        is_well = not process.has_renewed or self._failures(backend) == failures
        self.require(is_well, f"the kernels of {backend} are blamed although it only began anew")

    def _failures(self, backend: str) -> int:
        """What counts against its kernels."""
        health = self.state.engine.health
        return sum(health.view(*place, self.now_s).failures for place in health.places() if place[0] == backend)

    def _exit_event(
        self, process: Process, exit_code: int, page: tuple[int, str], page_poller: Mapping[int, ev.RingSnapshot]
    ) -> ev.WorkerExited:
        words = "Traceback\nlast words"
        return ev.WorkerExited(process.backend, process.generation, exit_code, *page, words, page_poller)

    def _count_exit(self, process: Process, exit_code: int) -> None:
        """What the restart budget must be."""
        backend, crashes, limits = process.backend, self._crashes[process.backend], self.limits
        if process.kill_reason == "rest" or self._has_heir(process):
            return
        if process.kill_reason == "forced":
            self._restart_from_s.pop(backend, None)
            return
        is_crash = process.kill_reason != "deadline" and not process.has_renewed
        if is_crash:
            crashes.append(self.now_s)
        recent = [at_s for at_s in crashes if at_s >= self.now_s - limits.restart_window_s]
        if process.was_ready and self.now_s - process.ready_s >= limits.restart_window_s:
            self._times_disabled[backend] = 0
        is_new, times = backend not in self._has_served, self._times_disabled[backend]
        self._restart_from_s[backend] = self.now_s + 0.75 * limits.backoff_s
        if is_new and not process.kill_reason and exit_code >= 0:
            self._is_broken[backend] = "never ready"
        elif len(recent) > limits.restart_budget or (times and is_crash) or (is_new and process.is_too_late):
            self._is_broken[backend] = CRASHES
            delay_s = min(limits.retry_disabled_s * 2**times, limits.retry_disabled_max_s)
            self._restart_from_s[backend] = self.now_s + delay_s
            self._times_disabled[backend] += 1
            crashes.clear()

    def _has_heir(self, process: Process) -> bool:
        """Another worker gets its calls, or will."""
        succession, backend = self.state.lifecycle.succession, process.backend
        if succession.workers[backend].generation != process.generation:
            return True
        successor = succession.successors.get(backend)
        return successor is not None and successor.fault is None

    def _lose_bound(self, process: Process, is_open: bool) -> bool:
        """What it had bound is bound elsewhere, or ends. Whether one is to blame for its end."""
        busy = self._busy_graph_slots(process)
        guilty = next((n for n in process.bound if n in busy), None) if is_open else None
        for number, dispatch in process.bound.items():
            call = dispatch.call
            dispatch.is_over = True
            if dispatch is process.late or number == guilty:
                call.fail_on(process.backend, process.kill_reason)
            if not call.client.has_left:
                call.client.open[call.seq] = call
        process.bound.clear()
        return guilty is not None

    def _strand(self, process: Process, stranded: list[Dispatch], guilty: Dispatch | None) -> None:
        """What was on its rings comes to the broker."""
        for one in stranded:
            call = one.call
            self.coverage.fates["ring_stranded"] += 1
            one.is_over = True
            self._note_arrival(call.client, call)
            if call.is_quarantined or self._is_stopping:
                continue
            call.dispatches.append(one)
            if one is guilty:
                self.coverage.fates["ring_blamed"] += 1
                call.fail_on(process.backend, process.kill_reason)
                if process.kill_reason:
                    call.faults.add(process.kill_reason)
            else:
                call.is_innocent_of = process.pid

    def _lose_enqueued(self, process: Process, exit_code: int, executing: int) -> bool:
        """What its GPU was not done with runs again. Whether its end is to blame on one of them."""
        is_open = executing >= 0
        if is_open and exit_code != STICKY_EXIT and any(d.number == executing for d in process.sent):
            is_open = False
        has_blamed = False
        for dispatch in process.enqueued.values():
            call = dispatch.call
            dispatch.is_over = True
            stream = self.stream(call)
            is_first = call.point is not None and stream.done < call.point.value <= stream.ready
            is_blamed = dispatch is process.late or (is_open and not has_blamed and is_first)
            if is_blamed:
                has_blamed = True
                call.fail_on(process.backend, process.kill_reason)
            if not call.client.has_left:
                call.client.open[call.seq] = call
        process.enqueued.clear()
        return has_blamed
