"""The express lane: calls of a settled route go straight to the worker, past the broker, while its lease holds.

Calls of several threads, and several of one, may be on it, as many as it has places; others go through the broker
meanwhile. Whatever does not end well here is brought to the broker, which knows what became of the worker, tries the
next kernel and says so in the report.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from layerzero.client.connection import arena, retained
from layerzero.client.connection.link import GRACE_S, Link
from layerzero.ipc.errors import BackendError, LayerZeroError, ProtocolError, from_wire
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.plain import unpack_body
from layerzero.ipc.transport.wire import Kind
from layerzero.ipc.vocabulary.neighbours import Neighbourhood

SPOILT_MS = 2  # between looks at a worker that is about to be killed


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


class Receipt(Protocol):
    """A call that is on a lane: its number, until when it may take on the monotonic clock, whether others were before
    it when it was put, and how it ended: (status, kernel ns, what the worker says), None while it has not. A status
    that is none: the end makes no sense."""

    call: int
    due_ns: int
    is_behind: bool

    def end(self) -> tuple[int, int, bytes] | None: ...


class Line(Protocol):
    """What is done to a lane's page and bells: here, or in client/session/_repeats.c."""

    def put(self, plan: int, body: bytes, hold: Any, timeout_ns: int, /) -> Receipt | None:
        """A call, whose memory `hold` keeps until it has ended; None when there is no room."""

    def withdraw(self, receipt: Any, /) -> bool:
        """Whether the worker has not got this call, nor will get it: then it has ended as declined, and what keeps its
        memory is let go of."""

    def withdraw_held(self, hold: Any, /) -> None:
        """As `withdraw`, of the calls whose memory `hold` keeps."""

    def see_ends(self) -> None:
        """Calls that have ended, and whose results nobody takes, are counted now."""

    def close(self) -> list[Any]:
        """Nothing is put there from now on. What keeps the memory of calls that have not ended."""


Wait: TypeAlias = Callable[[Any, float, int], object]
MakeLine: TypeAlias = Callable[[lane.Page, int, int], Line]


class Lane:
    """This process's end of a lane to one start of a worker."""

    def __init__(self, link: Link, number: int, make: MakeLine | None = None, wait: Wait | None = None) -> None:
        """`make` makes the line of a page and the two bells, and `wait` waits for one of its receipts so many seconds,
        of which the worker is expected to take so many ns; without them one call is on the lane at a time. Raises
        OutOfMemory, and OSError when the process has no file descriptors left."""
        self.number = number
        self.default_s = link.welcome.timeout_s
        self._link = link
        self._chain: dict[int, object] = {}  # whose is on the lane: one at a time, as its steps are told in one word
        self.is_closed = False
        self._forks = arena.forks
        fd = memory.create_memfd("lz-lane", lane.PAGE_BYTES)
        try:
            self.page = lane.Page(fd)
            bells = link.add_lane(number, fd)
        finally:
            os.close(fd)
        self.is_open = bool(bells)
        self.line: Line | None = None
        if bells:
            if make is None or wait is None:
                line = _Line(self.page, *bells)
                link.watch_hang_up(line.poll)
                make, wait = lambda *_: line, line.wait
            self.line, self._wait_for = make(self.page, *bells), wait

    @property
    def is_ended(self) -> bool:
        return self.is_closed or not self.is_open or self.page.is_ended

    @property
    def is_inherited(self) -> bool:
        """Whether it is of the process that this one was forked from."""
        return self._forks != arena.forks

    def holds(self, lease: Lease) -> bool:
        return self.page.epoch == lease.epoch

    def run(self, lease: Lease, refs: bytes, timeout_s: float, hold: Any) -> Ran | Lost | LayerZeroError | None:
        """Run a call whose memory `hold` keeps. None: it was not run here, and the broker takes it; an error: it failed
        here. Raises BrokerLost, and Cancelled when the session is closed meanwhile."""
        try:
            receipt = self.put(lease, refs + lease.values, timeout_s, hold)
            return None if receipt is None else self.resume(receipt, lease, timeout_s)
        except BaseException:  # an interrupt may come before there is a receipt here
            self._withdraw_held(hold)
            raise

    def run_chain(
        self, lease: Lease, body: bytes, timeout_s: float, hold: Any, expected_ns: int
    ) -> Ran | Stopped | None:
        """As `run`, of a chain; where it did not run to its end, how far it came. `expected_ns`: what the worker took
        for it before."""
        holder = object()
        try:
            receipt = self.begin_chain(holder, lease, body, timeout_s, hold)
            return None if receipt is None else self.end_chain(receipt, lease, timeout_s, expected_ns)
        except BaseException:
            self._withdraw_held(hold)
            raise
        finally:
            self.let_go(holder)

    def begin_chain(self, holder: object, lease: Lease, body: bytes, timeout_s: float, hold: Any) -> Receipt | None:
        """Send a chain; None: it was not sent. Nobody else may until `let_go` of this holder, which is to be called
        whatever comes: an interrupt may come before this returns."""
        if self._chain.setdefault(0, holder) is not holder:
            return None
        return self.put(lease, body, timeout_s, hold)

    def end_chain(self, receipt: Receipt, lease: Lease, timeout_s: float, expected_ns: int) -> Ran | Stopped | None:
        """Wait for a chain that was sent, as `run_chain` does."""
        end = self.resume(receipt, lease, timeout_s, expected_ns)
        return end if end is None or isinstance(end, Ran) else Stopped(*self.page.step_of(receipt.call), end)

    def give_up(self, receipt: Receipt) -> None:
        """Nobody waits for a call any more. Its memory is kept until its worker is done with it."""
        self._withdraw(receipt)

    def let_go(self, holder: object) -> None:
        """The chain of this holder, if there is one, has ended or nobody waits for it."""
        if self._chain.get(0) is holder:
            del self._chain[0]

    def put(self, lease: Lease, body: bytes, timeout_s: float, hold: Any) -> Receipt | None:
        """A call, which is not waited for; None: it was not sent."""
        if len(body) > lane.MAX_CALL_BYTES or self._link.lost is not None or self.is_ended or not self.holds(lease):
            return None
        assert self.line is not None
        return self.line.put(lease.plan, body, hold, int(1e9 * timeout_s))

    def is_awaited(self, receipt: Receipt, timeout_s: float, until_s: float) -> bool:
        """Wait for a call until then. Whether it goes on; else `resume` says what became of it. An interrupt leaves it
        on the lane."""
        while True:
            left_s = min(until_s, receipt.due_ns / 1e9) - time.monotonic()
            if left_s > 0 and self._link.lost is None and not self.is_closed:
                self._wait_for(receipt, left_s, 0)
            if not self.is_under_way(receipt):
                return False
            now_s = time.monotonic()
            if 1e9 * now_s >= receipt.due_ns and not self.gives_time(receipt, timeout_s):
                return False
            if now_s >= until_s:
                return True

    def resume(
        self, receipt: Receipt, lease: Lease, timeout_s: float, expected_ns: int = 0
    ) -> Ran | Lost | LayerZeroError | None:
        """What `run` returns of a call that is on the lane. `timeout_s`: how long it may take once it has begun."""
        try:
            return self._wait(receipt, lease.route, timeout_s, expected_ns)
        except BaseException:  # an interrupt, most of all
            self._withdraw(receipt)
            raise

    def _withdraw(self, receipt: Receipt) -> bool:
        """Whether the worker has not got the call, nor will get it."""
        assert self.line is not None
        return self.line.withdraw(receipt)

    def _withdraw_held(self, hold: Any) -> None:
        if self.line is not None:
            self.line.withdraw_held(hold)

    def gives_time(self, receipt: Receipt, timeout_s: float) -> bool:
        """Whether a call whose time on the lane is up, and that was behind others, has time of its own from now on: the
        worker has begun with it, nobody knows when."""
        if not receipt.is_behind or self._withdraw(receipt):
            return False
        receipt.is_behind, receipt.due_ns = False, time.monotonic_ns() + int(1e9 * timeout_s)
        return True

    def is_under_way(self, receipt: Receipt) -> bool:
        """Whether nothing has happened that `resume` would have to look at."""
        has_ended = receipt.end() is not None or self.page.is_ended
        return not (has_ended or self.is_closed or self._link.lost is not None or self._has_hung_up())

    def _has_hung_up(self, within_ms: int = 0) -> bool:
        """Whether the broker has. Threads may ask at once, which one poll object cannot."""
        poll = select.poll()
        self._link.watch_hang_up(poll)
        return bool(poll.poll(within_ms))

    def _wait(
        self, receipt: Receipt, route: int, timeout_s: float, expected_ns: int
    ) -> Ran | Lost | LayerZeroError | None:
        due_s, is_reported = receipt.due_ns / 1e9, False
        left_s = due_s - time.monotonic()
        while True:
            if self._link.lost is None and not self.is_closed:
                self._wait_for(receipt, left_s, expected_ns)
            expected_ns, end = 0, receipt.end()
            is_spoilt = end is not None and end[0] > lane.DECLINED
            if end is not None and not is_spoilt:
                return _outcome(receipt.call, *end)
            if self.page.is_ended:
                end = receipt.end()  # its last one may have come between two looks
                if end is not None and end[0] <= lane.DECLINED:
                    return _outcome(receipt.call, *end)
                return self._lost_place(receipt) if self._withdraw(receipt) else Lost(receipt.call)
            if self._link.lost is not None or self.is_closed or self._has_hung_up(SPOILT_MS * is_reported):
                raise self._link.gone(receipt)
            left_s = due_s - time.monotonic()
            if left_s > 0 and (is_reported or not is_spoilt):
                continue
            if not is_spoilt and self._withdraw(receipt):  # other calls come first: at the broker that is no fault
                return None
            if not is_spoilt and self.gives_time(receipt, timeout_s):
                due_s, left_s = receipt.due_ns / 1e9, timeout_s
                continue
            # Memory that was lent to a worker whose end makes no sense is not given to anyone before it is dead.
            if is_reported:
                self._link.check_alive()
            report = wire.pack(Kind.OVERDUE, route=route, seq=receipt.call, aux=self.number, time=int(timeout_s * 1e6))
            self._link.send(report)
            due_s, left_s, is_reported = time.monotonic() + GRACE_S, GRACE_S, True

    def _lost_place(self, receipt: Receipt) -> BackendError:
        return BackendError(f"the worker was gone before it took the call, the {receipt.call}. of its lane")

    def close(self) -> None:
        """Who waits here is told so; the link must have been closed, or the worker have ended. What a worker may still
        write to is kept."""
        if not self.is_closed and self.line is not None:
            self.is_closed = True
            for receipt in self.line.close():
                if not self.page.is_ended:
                    retained.quarantine(receipt, is_broker_dead=False)
        self.is_closed = True

    def abandon(self) -> None:
        """As `close`, in a forked child, where nobody waits although it may look so."""
        self.is_closed = True


@dataclass(slots=True)
class _Receipt:
    page: lane.Page
    call: int
    due_ns: int
    hold: Any
    is_behind: bool = False
    ended: tuple[int, int, bytes] | None = None

    def end(self) -> tuple[int, int, bytes] | None:
        """Read once: then its place is free."""
        if self.ended is None:
            try:
                self.ended = self.page.get_end(self.call)
            except ProtocolError:
                return lane.NO_PLAN, 0, b""
        return self.ended


class _Line:
    """A line that was not compiled. One call is on it at a time, and `poll` wakes its thread."""

    def __init__(self, page: lane.Page, doorbell: int, answer: int) -> None:
        self._page, self._doorbell, self._answer = page, doorbell, socket.socket(fileno=answer)
        self._turn, self._hears = threading.Lock(), threading.Lock()
        self._calls = 0
        self._open: _Receipt | None = None
        self.poll = select.poll()
        self.poll.register(self._answer, select.POLLIN)

    def __del__(self) -> None:
        os.close(self._doorbell)
        self._answer.close()

    def put(self, plan: int, body: bytes, hold: Any, timeout_ns: int, /) -> _Receipt | None:
        with self._turn:
            if self._is_taken():
                return None
            self._calls += 1
            made = self._open = _Receipt(self._page, self._calls, time.monotonic_ns() + timeout_ns, hold)
            self._page.put_call(made.call, plan, body)
        lane.ring(self._doorbell)
        return made

    def _is_taken(self) -> bool:
        """A call that its caller gave up may not have ended."""
        return self._open is not None and (self._open.end() is None or self._open.ended is None)

    def withdraw(self, receipt: _Receipt, /) -> bool:
        with self._turn:
            if receipt.ended is not None:
                return receipt.ended[0] == lane.DECLINED
            if not lane.take(self._doorbell):
                return False
            self._page.withdraw(receipt.call)
            receipt.ended = lane.DECLINED, 0, b""
            if self._open is receipt:  # its place is free when the worker has declined it
                self._open = _Receipt(self._page, receipt.call, receipt.due_ns, None)
        lane.ring(self._doorbell)
        return True

    def withdraw_held(self, hold: Any, /) -> None:
        held = self._open
        if held is not None and held.hold is hold:
            self.withdraw(held)

    def wait(self, receipt: Any, left_s: float, _: int) -> None:
        due_s, answer = time.monotonic() + left_s, self._answer.fileno()
        with self._hears:  # whoever had it before is leaving: its call has ended
            self._hear(receipt, due_s, answer)

    def _hear(self, receipt: _Receipt, due_s: float, answer: int) -> None:
        while receipt.end() is None and not self._page.is_ended:
            left_s = due_s - time.monotonic()
            if left_s <= 0 or any(fd != answer for fd, _ in self.poll.poll(1e3 * left_s)):
                return
            lane.hear(self._answer)

    def see_ends(self) -> None:
        """There are no calls here whose results nobody takes."""

    def close(self) -> list[_Receipt]:
        left = [self._open] if self._open is not None and self._is_taken() else []
        self._open = None
        return left


def _outcome(call: int, status: int, kernel_ns: int, said: bytes) -> Ran | LayerZeroError | None:
    if status == lane.OK:
        return Ran(call, kernel_ns, said)
    if status == lane.DECLINED:
        return None
    try:
        return from_wire(unpack_body(said))
    except ProtocolError as exc:
        return BackendError(f"the worker's answer breaks the protocol: {exc}")
