"""The express lanes of a connection: which calls may take one, and what follows when one does not end well there."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.client.connection.call import Route, Submitted, seconds
from layerzero.client.connection.express import Lane, Lease, Lost, Ran, Receipt
from layerzero.client.connection.link import Link
from layerzero.client.connection.report import EXPRESS, Attempt, Copy
from layerzero.client.gpu.lent_ring import Asked
from layerzero.client.session.repeats import Repeats
from layerzero.client.session.shadow import NEVER, Shadow
from layerzero.ipc.errors import BrokerLost, LayerZeroError, OutOfMemory

READ_EVERY = 64  # calls


@dataclass(slots=True)
class OnLane:
    """A call on a lane whose memory its maker has placed (`Request.places`)."""

    submitted: Submitted
    lane: Lane
    lease: Lease
    receipt: Receipt

    def end(self) -> tuple[int, int, bytes] | None:
        """As of its receipt."""
        return self.receipt.end()

    @property
    def timeout_s(self) -> float:
        return seconds(self.submitted.request, self.lane.default_s)

    def is_awaited(self, until_s: float) -> bool:
        """As Lane.is_awaited. Raises BrokerLost in a forked child."""
        if self.lane.is_inherited:
            raise BrokerLost("the call was submitted before a fork, and its answer goes to the parent; call again here")
        return self.lane.is_awaited(self.receipt, self.timeout_s, until_s)


class Lanes:
    """Threads may share it."""

    def __init__(self, link: Link, shadow: Shadow, repeats: Repeats, last: threading.local) -> None:
        """`last`: takes each thread's last call."""
        self._link, self._last = link, last
        self._repeats = repeats
        self._shadow = shadow
        self._lock = threading.RLock()
        self.by_number: dict[int, Lane] = {}
        self._noted = 0

    def of(self, route: Route) -> tuple[Lane, Lease] | None:
        """The lane that a route's calls may take, if any."""
        lease = route.lease
        if lease is None or route.needs_digest or self._shadow.next_seq != NEVER:
            return None
        lane = self.by_number.get(lease.lane) or self._open(lease.lane)
        if lane is None or lane.is_ended or not lane.holds(lease):
            route.lease = None
            self._drop_ended()
            return None
        return lane, lease

    def _drop_ended(self) -> None:
        """Others may be on such lanes, who are told so."""
        for lane in list(self.by_number.values()):
            if lane.is_ended and lane.is_open:  # of one that could not be opened the broker is not told again
                self.by_number.pop(lane.number, None)
                lane.close()

    def _open(self, number: int) -> Lane | None:
        """None when its worker is gone, or this process has no memory or descriptors left for it."""
        with self._lock:
            lane = self.by_number.get(number)
            if lane is None:
                self._drop_ended()
                try:
                    lane = Lane(self._link, number, self._repeats.make_line, self._repeats.wait)
                except (OSError, OutOfMemory):
                    return None
                self.by_number[number] = lane
            return lane

    def put(self, submitted: Submitted) -> OnLane | None:
        """A call whose memory was placed, on its lane; None where it has none, or there is no room."""
        place = self.of(submitted.route)
        if place is None:
            return None
        lane, lease = place
        timeout_s = seconds(submitted.request, lane.default_s)
        receipt = lane.put(lease, submitted.refs + lease.values, timeout_s, submitted.pending.hold)
        return None if receipt is None else OnLane(submitted, lane, lease, receipt)

    def end(self, placed: OnLane) -> Any:
        """The result of such a call that is not waited for any more; what was submitted where the broker takes it."""
        submitted, lane, lease = placed.submitted, placed.lane, placed.lease
        self._last.record = None  # until the call has ended
        end = lane.resume(placed.receipt, lease, placed.timeout_s)
        if not isinstance(end, Ran):
            self.leave(submitted, lane, lease, end)
            return submitted
        return self.finish(submitted, lane, lease, end)

    def finish(self, submitted: Submitted, lane: Lane, lease: Lease, ran: Ran) -> Any:
        """The result of a call that has ended well."""
        self._repeats.remember(submitted, lane, lease)
        submitted.pending.finish()
        if submitted.request.serves is not None:
            submitted.request.serves(lease.decision.backend)
        result = submitted.result(ran.said)
        route, copies, start_ns = submitted.route, submitted.copies, submitted.start_ns
        self.note(route, lease, (start_ns, time.perf_counter_ns()), ran.kernel_ns, copies)
        return result

    def note(
        self, route: Route, lease: Lease, span_ns: tuple[int, int], kernel_ns: int, copies: Sequence[Copy] = ()
    ) -> None:
        """Such a call is counted, and this thread's last one. Now and then the broker's answers are read after one:
        where nobody waits for those, they keep their memory till then."""
        (start_ns, end_ns), note, counters = span_ns, lease.note or route.stays_out, self._link.counters
        row = counters.row(route.plan.op, lease.decision.kernel_id, EXPRESS)
        counters.count(row, end_ns - start_ns, sum([copy.nbytes for copy in copies]))
        self._last.record = (route.plan, copies, start_ns, end_ns, kernel_ns, (), lease.decision, (), note)
        self._noted += 1
        if not self._noted % READ_EVERY:
            self._link.read_nowait()

    def end_asked(self, submitted: Submitted, asked: Asked) -> Any:
        """The result of a call on the ring of a GPU, which its caller has waited for."""
        decision = asked.lease.decision
        if submitted.request.serves is not None:
            submitted.request.serves(decision.backend)
        result = submitted.result(b"")
        self.note_asked(asked, submitted.copies)
        return result

    def note_asked(self, asked: Asked, copies: Sequence[Copy]) -> None:
        """As `note`, of a call on a ring."""
        asked.copies, asked.end_ns = copies, time.perf_counter_ns()
        asked.count(self._link.counters)
        its = (asked.route.plan, copies, asked.start_ns, asked.end_ns)
        self._last.record = (*its, 0, (), asked.lease.decision, (), asked.gpu.transport_note)

    def leave(self, submitted: Submitted, lane: Lane, lease: Lease, end: Lost | LayerZeroError | None) -> None:
        """What the broker, or the report, is to be told of a call that did not end well on a lane."""
        submitted.near = lease.route if lease.values else 0
        if lane.is_ended:
            submitted.route.lease = None
            self._drop_ended()
        if isinstance(end, Lost):
            submitted.after_lane, submitted.after_call = lane.number, end.call & 0xFFFF_FFFF
        elif end is not None:
            made = lease.decision
            attempt = Attempt(
                made.backend, made.kernel_id, end.code, end.message, phase=EXPRESS, worker_pid=made.worker_pid
            )
            submitted.prior = (attempt,)
            counters = self._link.counters
            counters.note_fallback(counters.row(submitted.request.op, made.kernel_id, EXPRESS), end.code)

    def see_ends(self) -> None:
        """Of calls whose results nobody takes: they are counted, while the broker reads that yet."""
        for lane in list(self.by_number.values()):
            if lane.line is not None:
                lane.line.see_ends()

    def close(self) -> None:
        """The link must have been closed."""
        for lane in list(self.by_number.values()):
            lane.close()
        self.by_number.clear()

    def abandon(self) -> None:
        """As `close`, in a forked child."""
        for lane in list(self.by_number.values()):
            lane.abandon()
