"""Calls of functions with arrays on a GPU that go past the broker: onto the ring of their worker (client/gpu/ring.py).
Their callers wait until the function has returned, which the ring says; its answer lies in shared memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerzero.client.connection.call import Route, Submitted
from layerzero.client.connection.express import Lease
from layerzero.client.connection.link import Link, Pending
from layerzero.client.connection.report import Copy
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.outcomes import OnRing, Outcomes
from layerzero.client.gpu.ring import GpuLane
from layerzero.ipc.errors import BrokerLost
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import Header, Kind

if TYPE_CHECKING:
    from layerzero.client.gpu.calls import GpuCalls

FIRST_S, MOST_S, GROWTH = 20e-6, 1e-3, 1.3  # of looks at the ring, once nobody looks all the time
NEWS_S = 100e-6  # of such a look; from then on it is seen what the broker says
SOME = 4  # calls that are awaited, the oldest: with each further one it is seen which of them are over
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
        hold: object,
    ) -> None:
        """`hold`: what it lends, and memory of its answer."""
        Pending.__init__(self, hold)
        OnRing.__init__(self, outcomes, gpu, lane, lease, op, route, copies, start_ns)
        self.is_awaited = True  # its caller raises its error
        self.is_done = True  # where the broker is heard of it, that has said all
        self._is_over = False  # its worker has said so

    def answer_again(self, header: Header, body: bytes) -> None:
        """As of others; the error of one that is awaited is raised by itself."""
        self.body, self.header = body, header
        self.outcomes.look_at_attempts(self)
        if header.kind == _FAILED and not self.is_awaited:
            self.outcomes.note_failure(self)

    def see(self) -> bool:
        """As ring.Awaited."""
        if not self._is_over and self.lane.is_enqueued(self.call):
            self._is_over = True
        if self._is_over or self.header is not None:
            self.hold = None
            self.lane.awaited.pop(self.call, None)
            return True
        return False

    def await_answer(self, link: Link, until_s: float = math.inf) -> bool:
        """Until the function has returned; False where the broker has answered in its worker's stead, which is for
        Session.finish. Raises TimeoutError at `until_s`, BrokerLost, NotConnected and Cancelled."""
        try:
            if not self._look():
                self._wait(link, until_s)
        except TimeoutError:
            raise
        except BaseException:  # an interrupt, most of all: what it lends is kept until it is over
            self.is_awaited = False
            raise
        if self.header is not None:
            return False
        self.is_awaited = False
        if self.header is not None and self.header.kind == _FAILED:  # just now, of what the GPU has to do yet
            self.outcomes.note_failure(self)
        return True

    def _look(self) -> bool:
        """Whether it is over, as is seen by looking all the time, for a moment."""
        spin, see = self.lane.spin, self.see
        spin_ns = spin.next_ns()
        if not spin_ns:
            return see()
        start_ns = now_ns = time.perf_counter_ns()
        while now_ns - start_ns < spin_ns:
            if see():
                spin.note(now_ns - start_ns)
                return True
            now_ns = time.perf_counter_ns()
        spin.note(None)
        return False

    def look_around(self, link: Link) -> bool:
        """As `see`, after what the broker says and where the worker has ended; also once the broker is lost."""
        if self.see() or link.lost is not None:
            return True
        link.read_nowait()
        with contextlib.suppress(BrokerLost):
            self._see_end(link)
        return self.see() or link.lost is not None

    def _see_end(self, link: Link) -> None:
        if self.lane.is_ended and self.header is None and self.gpu.order.page.is_done(self.point):
            link.check_alive()  # what the broker has said of it is here then
            self._is_over = self.header is None  # its worker had written the answer, and died before it said so

    def _wait(self, link: Link, until_s: float) -> None:
        lane, call, timeout_s = self.lane, self.call, self.timeout_s
        pause_s, due_s, is_reported = FIRST_S, math.inf, False
        while not self.see():
            if link.lost is not None:
                lane.awaited.pop(call, None)
                raise link.gone(self.hold)
            now_s = time.monotonic()
            if now_s >= until_s:
                raise TimeoutError(f"{self.op} is still running")
            time.sleep(pause_s)
            pause_s = min(pause_s * GROWTH, MOST_S)
            if pause_s < NEWS_S:
                continue
            link.read_nowait()
            self._see_end(link)
            if timeout_s and due_s == math.inf and lane.is_taken(call):
                due_s = now_s + timeout_s
            if now_s >= due_s:
                if is_reported:
                    link.check_alive()
                number, route = lane.number, self.route.number
                link.send(wire.pack(Kind.OVERDUE, route=route, seq=call, aux=number, time=int(timeout_s * 1e6)))
                due_s, is_reported = now_s + GRACE_S, True


def ask(
    gpus: GpuCalls,
    gpu: Gpu,
    place: tuple[GpuLane, Lease],
    its: tuple[str, Route, Sequence[Copy], int],
    stream: int,
    refs: bytes,
    hold: object,
    timeout_s: float | None,
) -> Asked:
    """Onto a ring, behind what the stream does so far, which then waits for it. `its`: op, route, copies and when it
    began. The GPU's lock is held, and its context is current."""
    lane, (op, route, copies, start_ns) = place[0], its
    asked = Asked(gpus.outcomes, gpu, lane, place[1], op, route, copies, start_ns, hold)
    asked.timeout_s = timeout_s or 0.0
    lane.see_awaited(SOME)
    try:
        gpus.put(asked, stream, refs, hold)
    except BaseException:
        asked.is_awaited = False
        raise
    lane.awaited[asked.call] = asked
    return asked


def put(gpus: GpuCalls, submitted: Submitted) -> Asked | None:
    """Onto the ring of the worker that has served such calls. None where that is not to be: the broker has it then, and
    nothing has been done."""
    request, route, refs = submitted.request, submitted.route, submitted.refs
    loan = request.on_gpu
    if route.lease is None or route.needs_digest:
        return None
    gpu = loan.gpu
    with gpu.lock:
        if gpus.is_closing or gpu.is_behind():
            return None
        place = gpus.lane_of(gpu, route, wire.arenas_of(refs))
        if place is None:
            return None
        its = (request.op, route, submitted.copies, submitted.start_ns)
        try:
            with gpu.memory.context:
                hold = (request, submitted.outputs)
                loan.pending = asked = ask(gpus, gpu, place, its, loan.stream, refs, hold, request.timeout_s)
                loan.sent()
        finally:
            loan.close()
    if not asked.point.value % LOOK_EVERY:
        gpu.wait_for_room(asked.point)
    return asked
