"""Calls of functions with arrays on a GPU that go past the broker: onto the ring of their worker (client/gpu/ring.py).
Their callers wait until the function has returned, which the ring says; its answer lies in shared memory."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerzero.client.connection import retained
from layerzero.client.connection.call import Route, Submitted
from layerzero.client.connection.express import Lease
from layerzero.client.connection.link import Link, Pending
from layerzero.client.connection.report import Copy
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.outcomes import OnRing, Outcomes
from layerzero.client.gpu.ring import GpuLane
from layerzero.ipc.shm.ring_words import ENQUEUED, REPLAYED
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import Header, Kind

if TYPE_CHECKING:
    from layerzero.client.gpu.calls import GpuCalls

FIRST_S, MOST_S, GROWTH = 20e-6, 1e-3, 1.3  # of looks at the ring, once nobody looks all the time
NEWS_S = 100e-6  # of such a look; from then on it is seen what the broker says
LOOK_EVERY = 16  # calls of a stream; then it is seen whether too many are open
GRACE_S = 2.0  # for the broker, to end a worker that takes too long
_FAILED = int(Kind.FAILED)


class Asked(OnRing, Pending):
    """A call on a ring that is waited for."""

    def __init__(
        self,
        outcomes: Outcomes,
        gpu: Gpu,
        lane: GpuLane,
        lease: Lease,
        op: str,
        route: Route,
        copies: Sequence[Copy],
        start_ns: int,
    ) -> None:
        Pending.__init__(self)
        OnRing.__init__(self, outcomes, gpu, lane, lease, op, route, copies, start_ns)
        self.is_awaited = True  # its caller raises its error
        self.is_done = True  # where the broker is heard of it, that has said all

    def answer_again(self, header: Header, body: bytes) -> None:
        """As of others; the error of one that is awaited is raised by itself."""
        self.body, self.header = body, header
        self.outcomes.look_at_attempts(self)
        if header.kind == _FAILED and not self.is_awaited:
            self.outcomes.note_failure(self)

    def await_answer(self, link: Link, hold: object) -> bool:
        """Until the function has returned; False where the broker has answered in its worker's stead, which is for
        Session.finish. `hold`: what was lent. Raises BrokerLost, NotConnected and Cancelled."""
        try:
            if not self._look():
                self._wait(link, hold)
        except BaseException:  # an interrupt, most of all: the worker may write to what was lent
            self.is_awaited = False
            retained.keep(hold)
            raise
        finally:
            self.lane.awaited.discard(self.call)
        if self.header is not None:
            return False
        self.is_awaited = False
        if self.header is not None and self.header.kind == _FAILED:  # just now, of what the GPU has to do yet
            self.outcomes.note_failure(self)
        return True

    def _look(self) -> bool:
        """Whether it is over, as is seen by looking all the time, for a moment."""
        lane, call = self.lane, self.call
        spin_ns = lane.spin.next_ns()
        if not spin_ns:
            return lane.status(call) in (ENQUEUED, REPLAYED)
        start_ns = now_ns = time.perf_counter_ns()
        while now_ns - start_ns < spin_ns:
            if lane.status(call) in (ENQUEUED, REPLAYED):
                lane.spin.note(now_ns - start_ns)
                return True
            now_ns = time.perf_counter_ns()
        lane.spin.note(None)
        return False

    def _wait(self, link: Link, hold: object) -> None:
        lane, call, timeout_s = self.lane, self.call, self.timeout_s
        pause_s, due_s, is_reported = FIRST_S, math.inf, False
        while self.header is None and lane.status(call) not in (ENQUEUED, REPLAYED):
            if link.lost is not None or lane.is_closed:
                raise link.gone(hold)
            time.sleep(pause_s)
            pause_s = min(pause_s * GROWTH, MOST_S)
            if pause_s < NEWS_S:
                continue
            link.read_nowait()
            now_s = time.monotonic()
            if timeout_s and due_s == math.inf and lane.is_taken(call):
                due_s = now_s + timeout_s
            if now_s >= due_s:
                if is_reported:
                    link.check_alive()
                number, route = lane.number, self.route.number
                link.send(wire.pack(Kind.OVERDUE, route=route, seq=call, aux=number, time=int(timeout_s * 1e6)))
                due_s, is_reported = now_s + GRACE_S, True


def put(gpus: GpuCalls, link: Link, submitted: Submitted) -> Asked | None:
    """Onto the ring of the worker that has served such calls, behind what the stream does so far, which then waits for
    it. None where that is not to be: the broker has it then, and nothing has been done."""
    loan, route, refs = submitted.request.on_gpu, submitted.route, submitted.refs
    if route.lease is None or route.needs_digest:
        return None
    gpu = loan.gpu
    with gpu.lock:
        if gpus.is_closing or gpu.is_behind():
            return None
        place = gpus.lane_of(gpu, route, wire.arenas_of(refs))
        if place is None:
            return None
        lane, lease = place
        op, copies, start_ns = submitted.request.op, submitted.copies, submitted.start_ns
        asked = Asked(gpus.outcomes, gpu, lane, lease, op, route, copies, start_ns)
        asked.timeout_s = submitted.request.timeout_s or 0.0
        loan.pending = asked
        try:
            with gpu.memory.context:
                gpus.put(asked, loan.stream, refs, submitted)
                asked.lane.awaited.add(asked.call)
                loan.sent()
        except BaseException:
            asked.is_awaited = False
            raise
        finally:
            loan.close()
    if not asked.point.value % LOOK_EVERY:
        gpu.wait_for_room(asked.point)
    return asked
