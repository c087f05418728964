"""The express lane: calls of a settled route go straight to the worker, past the broker, while its lease holds.

One call is on a lane at a time; others go through the broker meanwhile. Whatever does not end well here is brought to
the broker, which knows what became of the worker, tries the next kernel and says so in the report.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from layerzero.client.connection.link import GRACE_S, Link
from layerzero.ipc.errors import BackendError, LayerZeroError, ProtocolError, from_wire
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.plain import unpack_body
from layerzero.ipc.transport.wire import Kind
from layerzero.ipc.vocabulary.neighbours import Neighbourhood


@dataclass(frozen=True, slots=True)
class Lease:
    """Calls of `route` may go to `plan` on `lane` while the lane's page has `epoch`. Those of a neighbour of that route
    bring the values of its symbols along."""

    lane: int
    plan: int
    epoch: int
    decision: messages.Decision
    route: int
    values: bytes = b""
    neighbours: Neighbourhood | None = None  # of the route, whose calls may go there, too
    note: str = ""  # for reports


class Ran(NamedTuple):
    """A call that ended well."""

    call: int
    kernel_ns: int
    said: bytes


class Lost(NamedTuple):
    """The worker is gone; the broker knows how it ended."""

    call: int


class Lane:
    """This process's end of a lane to one start of a worker."""

    def __init__(self, link: Link, number: int) -> None:
        """Raises OutOfMemory, and OSError when the process has no file descriptors left."""
        self.number = number
        self.default_s = link.welcome.timeout_s
        self._link = link
        self._turn = threading.Lock()
        self._calls = 0
        self._open: tuple[int, Any] | None = None  # the call that the worker may still be writing for, and its memory
        self._is_closed = False
        fd = memory.create_memfd("lz-lane", memory.PAGE_BYTES)
        try:
            self._page = lane.Page(fd)
            bells = link.add_lane(number, fd)
        finally:
            os.close(fd)
        self.is_open = bool(bells)
        if bells:
            self._doorbell, self._answer = bells[0], socket.socket(fileno=bells[1])
            self._poll = select.poll()
            self._poll.register(self._answer, select.POLLIN)
            link.watch_hang_up(self._poll)

    @property
    def is_ended(self) -> bool:
        return self._is_closed or not self.is_open or self._page.is_ended

    def holds(self, lease: Lease) -> bool:
        return self._page.epoch == lease.epoch

    def run(self, lease: Lease, refs: bytes, timeout_s: float, hold: Any) -> Ran | Lost | LayerZeroError | None:
        """Run a call whose memory `hold` keeps. None: it was not run here, and the broker takes it; an error: it failed
        here. Raises BrokerLost, and Cancelled when the session is closed meanwhile."""
        body = refs + lease.values
        if len(body) > lane.MAX_CALL_BYTES or not self._turn.acquire(blocking=False):
            return None
        try:
            if self._link.lost is not None or self.is_ended or not self.holds(lease) or not self._is_free():
                return None
            call = self._calls = self._calls + 1
            self._open = (call, hold)
            self._page.put_call(call, lease.plan, body)
            lane.ring(self._doorbell)
            try:
                end = self._wait(call, lease.route, timeout_s)
            except BaseException:  # an interrupt, most of all
                if lane.take(self._doorbell):  # the worker never saw it
                    self._open = None
                raise
            self._open = None
            return end
        finally:
            self._turn.release()

    def _is_free(self) -> bool:
        """A call that its caller gave up has ended, too."""
        if self._open is not None and (self._page.done >= self._open[0] or self._page.is_ended):
            self._open = None
        return self._open is None

    def _wait(self, call: int, route: int, timeout_s: float) -> Ran | Lost | LayerZeroError | None:
        due_s, is_reported, answer = time.monotonic() + timeout_s, False, self._answer.fileno()
        while True:
            hung_up = [fd for fd, _ in self._poll.poll(1e3 * max(due_s - time.monotonic(), 0)) if fd != answer]
            lane.hear(self._answer)
            is_spoilt = False
            try:
                end = self._page.get_end(call)
            except ProtocolError:  # memory that such a worker was lent is not given to anyone before it is dead
                end, is_spoilt = None, True
            if end is not None:
                return _outcome(call, *end)
            if self._page.is_ended:
                return Lost(call)
            if hung_up:
                raise self._link.gone(self._open)
            if time.monotonic() < due_s and (is_reported or not is_spoilt):
                continue
            if not is_spoilt and lane.take(self._doorbell):  # other calls come first: at the broker that is no fault
                return None
            if is_reported:
                self._link.check_alive()
            report = wire.pack(Kind.OVERDUE, route=route, seq=call, aux=self.number, time=int(timeout_s * 1e6))
            self._link.send(report)
            due_s, is_reported = time.monotonic() + GRACE_S, True

    def close(self) -> None:
        """Waits for the call that is on the lane; the link must have been closed, or the lane have ended."""
        with self._turn:
            self.abandon()

    def abandon(self) -> None:
        """As `close`, in a forked child, where nobody is on the lane although it may look so."""
        if not self._is_closed:
            self._is_closed = True  # the page stays mapped while a thread looks at it
            if self.is_open:
                os.close(self._doorbell)
                self._answer.close()


def _outcome(call: int, status: int, kernel_ns: int, said: bytes) -> Ran | LayerZeroError | None:
    if status == lane.OK:
        return Ran(call, kernel_ns, said)
    if status == lane.DECLINED:
        return None
    try:
        return from_wire(unpack_body(said))
    except ProtocolError as exc:
        return BackendError(f"the worker's answer breaks the protocol: {exc}")
