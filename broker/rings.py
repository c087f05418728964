"""Calls on rings (docs/protocol.md, section 14) as the core sees them: those that workers leave to the broker, those
that come back from a dead worker, those that take too long, and those of clients that have left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from layerzero.broker import events as ev
from layerzero.broker.leases import Lane
from layerzero.broker.records import Call, Worker
from layerzero.broker.turns import STICKY_EXIT, is_before
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.lane import mark
from layerzero.ipc.order import Turn
from layerzero.ipc.ring import RingCall

if TYPE_CHECKING:
    from layerzero.broker.state import BrokerState


class Stranded(NamedTuple):
    """A call on the ring of a worker that has ended."""

    lane: Lane
    call: RingCall
    is_ready: bool


class Rings:
    """Part of the core: `core` places the calls, and takes what must be done."""

    def __init__(self, core: BrokerState) -> None:
        self._core = core

    @property
    def is_awaited(self) -> bool:
        """Whether a client has left whose calls on rings are to be ended, one after the other."""
        return any(lane.client.has_left for lane in self._core.leases.lanes.values())

    # --- calls that workers leave --------------------------------------------------------------------

    def take(self, event: ev.CallLeft) -> None:
        core = self._core
        worker, lane = core.answering(event.identity), core.leases.lanes.get(event.lane)
        if worker is None or lane is None:  # it is being killed, and its calls are read off the ring; or nobody is left
            core.stale += 1
            return
        number = event.call.call
        if lane.worker is not worker or number in lane.left:
            core.fault(worker, ProtocolError(f"left call {number} of lane {lane.number}, which it does not have"))
            return
        lane.leave(number)
        lane.begun.pop(number, None)
        call = self._admit(lane, event.call)
        if call is None:
            return
        kernel_id = lane.kernels.get(call.route.number)
        if event.error is None or kernel_id is None:
            core.place(call)
        else:
            call.kernel_id, call.attempt = kernel_id, 1
            core.attempt_failed(call, worker, event.error)

    def _admit(self, lane: Lane, call: RingCall) -> Call | None:
        """As if EXECUTE had come with it. None when the call has ended in an error, or its client is gone."""
        if lane.client.has_left:
            return None
        event = ev.CallArrived(lane.client.identity, call.route, call.seq, 0.0, call.refs, turn=call.turn)
        return self._core.admit(event, is_bounded=False)  # the ring itself has bounds

    # --- the end of a worker -------------------------------------------------------------------------

    def stranded(self, worker: Worker, event: ev.WorkerExited) -> list[Stranded]:
        """What was on its rings and had not been left; to be asked before its lanes end."""
        return [
            Stranded(lane, call, call.call in look.ready)
            for lane in self._core.leases.rings(worker)
            if (look := event.rings.get(lane.number)) is not None and not lane.client.has_left
            for call in look.calls
            if call.call not in lane.left
        ]

    @staticmethod
    def named(worker: Worker, stranded: list[Stranded], event: ev.WorkerExited) -> Stranded | None:
        """The one that the worker was killed for, or that its CPU died in."""
        wanted = event.executing if worker.fault is None else worker.fault_call
        if worker.fault is None and event.exit_code == STICKY_EXIT:
            return None  # what the GPU was in is to blame
        return next((one for one in stranded if mark(one.lane.number, one.call.call) == wanted), None)

    def come_back(self, stranded: list[Stranded], blamed: Stranded | None) -> None:
        """Their worker has ended: they run elsewhere, or end."""
        for one in stranded:
            lost = one.lane.client.lost.get(one.lane.number)
            call = self._admit(one.lane, one.call)
            if call is not None and lost is not None:
                self._core.resume(call, replace(lost, phase="executing"), is_blamed=one is blamed)

    # --- looks at the rings --------------------------------------------------------------------------

    def see(self, event: ev.RingsSeen) -> None:
        rings = self._core.leases.rings()
        for lane in rings:
            look = event.looks.get(lane.number)
            if look is not None:
                self._end_late(lane, look)
        for client in dict.fromkeys(lane.client.identity for lane in rings if lane.client.has_left):
            self._end_left([lane for lane in rings if lane.client.identity == client], event.looks)

    def _end_late(self, lane: Lane, look: ev.RingLook) -> None:
        """A GPU is in a call from when its READY is there: then all before it in its lane are done. One that waits for
        the worker's CPU waits for a call that has its own deadline."""
        core, worker = self._core, lane.worker
        ready = [call for call in look.calls if call.call in look.ready and call.call not in lane.left]
        if worker.running:
            ready = [call for call in ready if call.call <= look.taken]
        lane.begun = {call.call: lane.begun.get(call.call, core.now_s) for call in ready}
        timeout_s = core.limits.timeout_s
        late = next((call for call in ready if core.now_s - lane.begun[call.call] >= timeout_s), None)
        if late is not None and worker.fault is None:
            name = lane.kernels.get(late.route, f"a call of {worker.backend}")
            core.fault(worker, core.too_long(name, worker, timeout_s), mark(lane.number, late.call))

    def _end_left(self, rings: list[Lane], looks: Mapping[int, ev.RingLook]) -> None:
        """A client has left: in each lane of its order pages the first call counts as ready, be it on a ring or not,
        and so on, until nothing is on its rings."""
        core, client = self._core, rings[0].client
        if any(lane.number not in looks for lane in rings):
            return
        firsts: dict[tuple[str, int], int] = {}
        on_rings = {
            lane.number: [call for call in looks[lane.number].calls if call.call not in lane.left] for lane in rings
        }
        open_turns = [(turn.gpu, turn.turn) for turn in core.turns.of(client) if turn.call is not None]
        open_turns += [(lane.gpu, call.turn) for lane in rings for call in on_rings[lane.number]]
        for gpu, turn in open_turns:
            first = firsts.setdefault((gpu, turn.lane), turn.number)
            if is_before(turn.number, first):
                firsts[gpu, turn.lane] = turn.number
        for (gpu, number), first in firsts.items():
            core.do(ev.ReleaseTurn(client.number, gpu, Turn(number, first)))
        for lane in rings:
            if not on_rings[lane.number]:
                core.do(*core.leases.end_ring(lane))
        core.finish_leaving(client)
