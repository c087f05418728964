"""The express lanes of a connection: which calls may take one, and what follows when one does not end well there."""

from __future__ import annotations

import threading

from layerzero.client.connection.call import Route, Submitted
from layerzero.client.connection.express import Lane, Lease, Lost
from layerzero.client.connection.link import Link
from layerzero.client.connection.report import EXPRESS, Attempt
from layerzero.client.session.repeats import Repeats
from layerzero.client.session.shadow import NEVER, Shadow
from layerzero.ipc.errors import LayerZeroError, OutOfMemory


class Lanes:
    """Threads may share it."""

    def __init__(self, link: Link, shadow: Shadow, repeats: Repeats) -> None:
        self._link = link
        self._repeats = repeats
        self._shadow = shadow
        self._lock = threading.RLock()
        self.by_number: dict[int, Lane] = {}

    def of(self, route: Route) -> tuple[Lane, Lease] | None:
        """The lane that a route's calls may take, if any."""
        lease = route.lease
        if lease is None or route.needs_digest or self._shadow.next_seq != NEVER:
            return None
        lane = self.by_number.get(lease.lane) or self._open(lease.lane)
        if lane is None or lane.is_ended or not lane.holds(lease):
            route.lease = None
            return None
        return lane, lease

    def _open(self, number: int) -> Lane | None:
        """None when its worker is gone, or this process has no memory or descriptors left for it."""
        with self._lock:
            lane = self.by_number.get(number)
            if lane is None:
                try:
                    lane = Lane(self._link, number, self._repeats.make_line, self._repeats.wait)
                except (OSError, OutOfMemory):
                    return None
                self.by_number[number] = lane
            return lane

    def leave(self, submitted: Submitted, lane: Lane, lease: Lease, end: Lost | LayerZeroError | None) -> None:
        """What the broker, or the report, is to be told of a call that did not end well on a lane."""
        submitted.near = lease.route if lease.values else 0
        if lane.is_ended:  # others may be on it, who are told so
            submitted.route.lease = None
            self.by_number.pop(lane.number, None)
            lane.close()
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
