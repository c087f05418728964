"""Calls on rings (docs/protocol.md, section 14) as the core sees them: those that workers leave to the broker, those
that come back from a dead worker, those that take too long, and those of clients that have left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.admission import Admission, bounded
from layerzero.broker.core.blame import Blame
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.leases import Lane, Leases
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Call, Client, Worker
from layerzero.broker.core.release import Release
from layerzero.broker.core.stream_order import StreamOrder
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle, too_long
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm.ring_words import RingCall
from layerzero.ipc.shm.timeline_words import TimelinePoint, is_before
from layerzero.ipc.vocabulary.worker_codes import LANE_CALL, lane_of, mark


class Stranded(NamedTuple):
    """A call on the ring of a worker that has ended."""

    lane: Lane
    call: RingCall
    is_ready: bool
    is_enqueued: bool = False

    @property
    def mark(self) -> int:
        return mark(self.lane.number, self.call.call)


@dataclass(eq=False, kw_only=True)
class RingCalls:
    lifecycle: WorkerLifecycle
    leases: Leases
    points: StreamOrder
    admission: Admission
    calls: Dispatch
    closing: Release
    limits: Limits
    effects: Effects

    @property
    def is_awaited(self) -> bool:
        """Whether a client has left whose calls on rings are to be ended, one after the other."""
        return any(lane.client.has_left for lane in self.leases.lanes.values())

    # --- calls that workers leave --------------------------------------------------------------------

    def on_call_left(self, event: ev.CallHandedBack) -> None:
        worker, lane = self.lifecycle.answering(event.identity), self.leases.lanes.get(event.lane)
        if worker is None or lane is None:  # it is being killed, and its calls are read off the ring; or nobody is left
            self.lifecycle.stale += 1
            return
        number = event.call.call
        if lane.worker is not worker or number in lane.left:
            self.lifecycle.fault(
                worker, ProtocolError(f"left call {number} of lane {lane.number}, which it does not have")
            )
            return
        lane.leave(number)
        lane.begun.pop(number, None)
        call = self._admit(lane, event.call)
        if call is None:
            return
        kernel_id = lane.kernels.get(call.route.number)
        if event.error is None or kernel_id is None:
            self.calls.place(call)
        else:
            call.kernel_id, call.attempt = kernel_id, 1
            self.calls.attempt_failed(call, worker, event.error)

    def _admit(self, lane: Lane, call: RingCall) -> Call | None:
        """As if EXECUTE had come with it. None when the call has ended in an error, or its client is gone."""
        if lane.client.has_left:
            return None
        event = ev.CallArrived(lane.client.identity, call.route, call.seq, call.timeout_s, call.refs, point=call.point)
        admitted = self.admission.admit(event, is_bounded=False)  # the ring itself has bounds
        if admitted is not None:
            admitted.is_counted = True
        return admitted

    # --- the end of a worker -------------------------------------------------------------------------

    def stranded(self, worker: Worker, event: ev.WorkerExited) -> list[Stranded]:
        """What was on its rings and had not been left; to be asked before its lanes end."""
        return [
            Stranded(lane, call, call.call in look.ready, call.call in look.enqueued)
            for lane in self.leases.rings(worker)
            if (look := event.rings.get(lane.number)) is not None and not lane.client.has_left
            for call in look.calls
            if call.call not in lane.left
        ]

    def come_back(self, one: Stranded, *, is_blamed: bool, has_begun: bool = False) -> None:
        """Its worker has ended, in the middle of it where it `has_begun`: it runs elsewhere, or ends."""
        lost = one.lane.client.lost.get(one.lane.number)
        call = self._admit(one.lane, one.call)
        if call is not None and lost is not None:
            call.was_enqueued, call.has_begun = one.is_enqueued, has_begun
            self.admission.resume(call, replace(lost, phase="executing"), is_blamed=is_blamed)

    # --- looks at the rings --------------------------------------------------------------------------

    def on_rings_seen(self, event: ev.RingsPolled) -> None:
        rings = self.leases.rings()
        for lane in rings:
            look = event.page_poller.get(lane.number)
            if look is not None and event.executing is not None:
                self._end_late(lane, look, event.executing.get((lane.worker.backend, lane.generation), 0))
        for client in dict.fromkeys(lane.client.identity for lane in rings if lane.client.has_left):
            self._end_left([lane for lane in rings if lane.client.identity == client], event.page_poller)

    def _end_late(self, lane: Lane, look: ev.RingSnapshot, executing: int) -> None:
        """A GPU is in a call from when its READY is there: then all before it in its lane are done. The CPU is in what
        is `executing`; what waits for it does not count while that is another, which has its own deadline, and counts
        anew once it was taken."""
        now_s, worker = self.effects.now_s, lane.worker
        is_busy = bool(executing or worker.running)
        if is_busy and any(one.call > look.taken for one in look.calls):
            self.end_lane_call(worker, executing)
        counted = {
            one.call: one.call <= look.taken
            for one in look.calls
            if one.call not in lane.left
            and (mark(lane.number, one.call) == executing or one.call in look.ready)
            and (one.call <= look.taken or not is_busy)
        }
        lane.begun = {
            call: lane.begun[call] if call in lane.begun and lane.begun[call][0] == is_taken else (is_taken, now_s)
            for call, is_taken in counted.items()
        }
        late = next((one for one in look.calls if self._is_late(lane, one)), None)
        if late is not None and worker.fault is None:
            name, timeout_s = lane.kernels.get(late.route, f"a call of {worker.backend}"), self._timeout_s(late)
            self.note_forced(lane.client, timeout_s)
            self.lifecycle.fault(worker, too_long(name, worker, timeout_s), Blame(mark=mark(lane.number, late.call)))

    def end_lane_call(self, worker: Worker, executing: int) -> None:
        """Others wait for a call of an express lane: for one of the CPU not for ever. Its client watches its deadline,
        unless it has left; those on rings are watched here."""
        lane, now_s, timeout_s = self.leases.lanes.get(lane_of(executing)), self.effects.now_s, self.limits.timeout_s
        if not executing & LANE_CALL or (lane is not None and lane.gpu):
            return
        if worker.lane_call != executing:
            worker.lane_call, worker.lane_call_since_s = executing, now_s
        elif now_s >= worker.lane_call_since_s + timeout_s:
            error = too_long("a call on an express lane", worker, timeout_s)
            self.lifecycle.fault(worker, error, Blame(mark=executing))

    def _is_late(self, lane: Lane, call: RingCall) -> bool:
        begun = lane.begun.get(call.call)
        return begun is not None and self.effects.now_s - begun[1] >= self._timeout_s(call)

    def _timeout_s(self, call: RingCall) -> float:
        return bounded(call.timeout_s) if call.timeout_s else self.limits.timeout_s

    def note_forced(self, client: Client, timeout_s: float) -> None:
        """A worker is killed for a timeout of this client's own choice, or on its word alone."""
        if timeout_s < self.limits.timeout_s and not client.has_left:
            client.forced_s.append(self.effects.now_s)
            if client.has_forced_too_many(self.effects.now_s):  # by the broker, it is refused more
                self.effects.emit(*self.leases.revoke(self.leases.of(client)))

    def _end_left(self, rings: list[Lane], page_poller: Mapping[int, ev.RingSnapshot]) -> None:
        """A client has left: in each lane of its timeline pages the first call counts as ready, be it on a ring or not,
        and so on, until nothing is on its rings."""
        client = rings[0].client
        if any(lane.number not in page_poller for lane in rings):
            return
        firsts: dict[tuple[str, int], int] = {}  # the first open point's number, by GPU and lane of its timeline page
        on_rings = {
            lane.number: [call for call in page_poller[lane.number].calls if call.call not in lane.left]
            for lane in rings
        }
        open_points = [(point.gpu, point.point) for point in self.points.of(client) if point.call is not None]
        open_points += [(lane.gpu, call.point) for lane in rings for call in on_rings[lane.number]]
        for gpu, point in open_points:
            first = firsts.setdefault((gpu, point.timeline), point.value)
            if is_before(point.value, first):
                firsts[gpu, point.timeline] = point.value
        for (gpu, order_lane), number in firsts.items():
            self.effects.emit(act.ReleaseTurn(client.number, gpu, TimelinePoint(order_lane, number)))
        for lane in rings:
            if not on_rings[lane.number]:
                self.effects.emit(*self.leases.end_ring(lane))
        self.closing.finish_leaving(client)
