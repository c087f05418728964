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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from layerzero.client.connection.arena import Arena
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


class Stopped(NamedTuple):
    """A chain that did not end well: the step that was begun last; whether steps were run, and those before it have
    ended, or none was; and what became of it."""

    step: int
    has_run: bool
    end: Lost | LayerZeroError


class Lost(NamedTuple):
    """The worker is gone; the broker knows how it ended."""

    call: int


Send: TypeAlias = Callable[["Lane", int, int, bytes, float, int], object]


class Lane:
    """This process's end of a lane to one start of a worker."""

    def __init__(self, link: Link, number: int) -> None:
        """Raises OutOfMemory, and OSError when the process has no file descriptors left."""
        self.number = number
        self.default_s = link.welcome.timeout_s
        self._link = link
        self.turn = threading.Lock()
        self.calls = 0
        self.open_call: tuple[int, Any] | None = None  # that the worker may still write for, and its memory
        self.is_closed = False
        self.scratch: tuple[memoryview, Arena, int] | None = None  # for inputs; whoever has the turn may use it
        self.line: Any = None  # what client/session/_repeats.c has of it
        fd = memory.create_memfd("lz-lane", memory.PAGE_BYTES)
        try:
            self.page = lane.Page(fd)
            bells = link.add_lane(number, fd)
        finally:
            os.close(fd)
        self.is_open = bool(bells)
        if bells:
            self.doorbell, self.answer = bells[0], socket.socket(fileno=bells[1])
            self._poll = select.poll()
            self._poll.register(self.answer, select.POLLIN)
            link.watch_hang_up(self._poll)

    @property
    def is_ended(self) -> bool:
        return self.is_closed or not self.is_open or self.page.is_ended

    def holds(self, lease: Lease) -> bool:
        return self.page.epoch == lease.epoch

    def run(
        self, lease: Lease, refs: bytes, timeout_s: float, hold: Any, send: Send | None = None
    ) -> Ran | Lost | LayerZeroError | None:
        """Run a call whose memory `hold` keeps. None: it was not run here, and the broker takes it; an error: it failed
        here. `send`: as of `run_chain`. Raises BrokerLost, and Cancelled when the session is closed meanwhile."""
        body = refs + lease.values
        if len(body) > lane.MAX_CALL_BYTES or not self.turn.acquire(blocking=False):
            return None
        try:
            return self._carry(lease, body, timeout_s, hold, send)
        finally:
            self.turn.release()

    def run_chain(
        self, lease: Lease, body: bytes, timeout_s: float, hold: Any, send: Send | None, expected_ns: int
    ) -> Ran | Stopped | None:
        """As `run`, of a chain; where it did not run to its end, how far it came. `send` puts it on the page in C, and
        waits for a while; `expected_ns`: what the worker took for it before."""
        if not self.turn.acquire(blocking=False):
            return None
        try:
            end = self._carry(lease, body, timeout_s, hold, send, expected_ns)
            # While nobody else can put a call there.
            return end if end is None or isinstance(end, Ran) else Stopped(*self.page.step_of(self.calls), end)
        finally:
            self.turn.release()

    def _carry(
        self, lease: Lease, body: bytes, timeout_s: float, hold: Any, send: Send | None = None, expected_ns: int = 0
    ) -> Ran | Lost | LayerZeroError | None:
        """As `run`; its caller has the turn."""
        if self._link.lost is not None or self.is_ended or not self.holds(lease) or not self._is_free():
            return None
        call = self.calls = self.calls + 1
        self.open_call = (call, hold)
        if send is not None:
            send(self, call, lease.plan, body, timeout_s, expected_ns)
            return self._ran(call) or self.resume(call, lease, timeout_s)
        self.page.put_call(call, lease.plan, body)
        lane.ring(self.doorbell)
        return self.resume(call, lease, timeout_s, looks_first=False)

    def resume(
        self, call: int, lease: Lease, timeout_s: float, *, looks_first: bool = True
    ) -> Ran | Lost | LayerZeroError | None:
        """What `run` returns of a call that is on the lane, whose turn the caller has. `open_call` is that call.
        `looks_first`: its ring may have been heard."""
        try:
            end = self._wait(call, lease.route, timeout_s, looks_first=looks_first)
        except BaseException:  # an interrupt, most of all
            if lane.take(self.doorbell):  # the worker never saw it
                self.open_call = None
            raise
        self.open_call = None
        return end

    def _ran(self, call: int) -> Ran | None:
        """None for a call that has not ended well, or not yet."""
        try:
            end = self.page.get_end(call)
        except ProtocolError:  # `resume` makes it known
            return None
        if end is None or end[0] != lane.OK:
            return None
        self.open_call = None
        return Ran(call, end[1], end[2])

    def _is_free(self) -> bool:
        """A call that its caller gave up has ended, too."""
        if self.open_call is not None and (self.page.done >= self.open_call[0] or self.page.is_ended):
            self.open_call = None
        return self.open_call is None

    def _wait(
        self, call: int, route: int, timeout_s: float, *, looks_first: bool
    ) -> Ran | Lost | LayerZeroError | None:
        due_s, is_reported, answer = time.monotonic() + timeout_s, False, self.answer.fileno()
        while True:
            left_s = 0.0 if looks_first else max(due_s - time.monotonic(), 0)
            hung_up = [fd for fd, _ in self._poll.poll(1e3 * left_s) if fd != answer]
            looks_first = False
            lane.hear(self.answer)
            is_spoilt = False
            try:
                end = self.page.get_end(call)
            except ProtocolError:  # memory that such a worker was lent is not given to anyone before it is dead
                end, is_spoilt = None, True
            if end is not None:
                return _outcome(call, *end)
            if self.page.is_ended:
                return Lost(call)
            if hung_up:
                raise self._link.gone(self.open_call)
            if time.monotonic() < due_s and (is_reported or not is_spoilt):
                continue
            if not is_spoilt and lane.take(self.doorbell):  # other calls come first: at the broker that is no fault
                return None
            if is_reported:
                self._link.check_alive()
            report = wire.pack(Kind.OVERDUE, route=route, seq=call, aux=self.number, time=int(timeout_s * 1e6))
            self._link.send(report)
            due_s, is_reported = time.monotonic() + GRACE_S, True

    def close(self) -> None:
        """Waits for the call that is on the lane; the link must have been closed, or the lane have ended."""
        with self.turn:
            self.abandon()

    def abandon(self) -> None:
        """As `close`, in a forked child, where nobody is on the lane although it may look so."""
        if not self.is_closed:
            self.is_closed = True  # the page stays mapped while a thread looks at it
            self.scratch = None
            if self.is_open:
                os.close(self.doorbell)
                self.answer.close()


def _outcome(call: int, status: int, kernel_ns: int, said: bytes) -> Ran | LayerZeroError | None:
    if status == lane.OK:
        return Ran(call, kernel_ns, said)
    if status == lane.DECLINED:
        return None
    try:
        return from_wire(unpack_body(said))
    except ProtocolError as exc:
        return BackendError(f"the worker's answer breaks the protocol: {exc}")
