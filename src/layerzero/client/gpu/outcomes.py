"""What becomes of calls on a GPU after they have returned: answers that come later, errors, reports."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from layerzero.client.connection import retained
from layerzero.client.connection.call import Route, error_of
from layerzero.client.connection.counters import Counters
from layerzero.client.connection.express import Lease
from layerzero.client.connection.link import Link, Pending
from layerzero.client.connection.record import failure_of, report_of, waited
from layerzero.client.connection.report import Copy, SelectionReport
from layerzero.client.gpu.deaths import Deaths, Given, with_note
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.ring import GpuLane
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.shm import ring_words
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.wire import Header, Kind

RING = "ring"  # the path of counters
MAX_LATE = 4096  # calls that may still get an answer after they have returned
LOOK_S = 0.0002
_FAILED = int(Kind.FAILED)
_REPLAYED = "; the worker replayed a CUDA graph"


class Enqueued:
    """A call that its caller does not wait for."""

    # What is not known of most, so that making one costs little.
    header: Header | None = None
    body = b""
    error: LayerZeroError | None = None
    end_ns = 0
    point = TimelinePoint(0, 0)
    call = 0  # on a ring
    refs = b""  # where its tensors lie, as its worker was told
    has_out = False  # the caller's own memory takes the result
    given: Given | None = None  # its arguments, where they are held until it is done
    not_held = ""  # why its arguments are not, or not any more
    taken: tuple[Any, ...] = ()  # its capsules
    is_apart = False  # its caller looks for its error

    def __init__(
        self, outcomes: Outcomes, gpu: Gpu, op: str, route: Route, copies: Sequence[Copy], start_ns: int
    ) -> None:
        self.outcomes, self.gpu, self.op, self.route, self.copies = outcomes, gpu, op, route, copies
        self.start_ns, self.stays_out = start_ns, route.stays_out

    def answer_again(self, header: Header, body: bytes) -> None:
        """The worker died, or left the call to the broker: what counts is how the call ended elsewhere."""
        self.header, self.body = header, body
        self.outcomes.look_at_attempts(self)
        if header.kind == _FAILED:
            self.outcomes.note_failure(self)


class OnRing(Enqueued):
    """One that was put on a ring: the broker answers only if something went wrong there."""

    timeout_s = 0.0  # its own; 0 for the broker's

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
        self.outcomes, self.gpu, self.op, self.route, self.copies = outcomes, gpu, op, route, copies
        self.lane, self.lease, self.start_ns, self.stays_out = lane, lease, start_ns, route.stays_out

    def count(self, counters: Counters) -> None:
        """It is on its ring, and its caller goes on."""
        row = counters.row(self.op, self.lease.decision.kernel_id, RING)
        counters.count(row, self.end_ns - self.start_ns, sum([copy.nbytes for copy in self.copies]))

    def end(self, stream: int, hold: object, *, is_out: bool) -> None:
        """End its point after an error. `is_out`: somebody has the call. Then its turn ends as any other, or DONE would
        go back later."""
        if is_out:
            retained.keep(hold)
            self.gpu.order.enter(stream, self.point)
        else:
            self.gpu.give_up(stream, self.point, hold)


class Sent(Enqueued, Pending):
    """One that the broker answers once a worker has enqueued it."""

    def __init__(
        self, outcomes: Outcomes, gpu: Gpu, transport: str, op: str, route: Route, copies: Sequence[Copy], start_ns: int
    ) -> None:
        Pending.__init__(self)
        Enqueued.__init__(self, outcomes, gpu, op, route, copies, start_ns)
        self.transport = transport
        self.is_awaited = False  # its caller raises its error
        self.arenas: frozenset[int] = frozenset()

    def finish(self) -> None:
        if self.header is not None:
            self.outcomes.look_at_attempts(self)  # before anybody who waits asks for its capsule
        super().finish()
        if self.header is None:
            return
        if self.header.kind != _FAILED:
            decision = self.route.decisions.get(self.header.aux)
            if decision is not None:
                self.gpu.note_reached(decision.slot, self.arenas)
        elif not self.is_awaited:
            self.outcomes.note_failure(self)


class Outcomes:
    """Of one connection. Threads may share it."""

    def __init__(self, link: Link, ask: Callable[..., Any], deaths: Deaths) -> None:
        """`ask` puts a question to the broker."""
        self._link, self._ask, self.deaths = link, ask, deaths
        self.failed: deque[Enqueued] = deque()
        self.late: dict[int, Enqueued] = {}
        self._kept: dict[int, Enqueued] = {}
        link.on_late = self._answer_late

    @property
    def has_failure(self) -> bool:
        return bool(self.failed)

    def expect(self, seq: int, enqueued: Enqueued) -> None:
        """There may be an answer, or another one, after the call has returned."""
        late = self.late
        late[seq] = enqueued
        if len(late) >= 2 * MAX_LATE:  # those that are done get no answer any more
            for known in list(late)[:MAX_LATE]:
                one = late.get(known)
                if one is not None and one.gpu.order.page.is_done(one.point):
                    late.pop(known, None)

    def keep(self, seq: int, enqueued: Enqueued) -> None:
        """As `expect`, until `forget`."""
        self._kept[seq] = enqueued

    def forget(self, seq: int) -> None:
        self._kept.pop(seq, None)

    def _answer_late(self, header: Header, body: bytes) -> None:
        enqueued = self.late.get(header.seq) or self._kept.get(header.seq)
        if enqueued is not None:
            enqueued.answer_again(header, body)

    def look_at_attempts(self, enqueued: Enqueued) -> None:
        """The broker has said what became of a call: some of its workers may have died."""
        header = enqueued.header
        assert header is not None
        is_told = header.kind != _FAILED and header.flags & wire.HAS_OUTCOME
        if header.kind == _FAILED or (is_told and messages.decode(enqueued.body, messages.Outcome).attempts):
            self.deaths.note(enqueued)

    def failed_report(self, enqueued: Enqueued, outcome: messages.Outcome) -> SelectionReport:
        """Of a call that nobody could serve, with its capsule."""
        report = failure_of(enqueued.op, enqueued.copies, enqueued.start_ns, outcome)
        return with_note(report, self.deaths.note_of(enqueued))

    def note_failure(self, enqueued: Enqueued) -> None:
        """It is raised by the next call, which is waited for if it is on the same route."""
        enqueued.route.is_armed = False
        if enqueued.is_apart:
            return
        if enqueued not in self.failed:  # a graph that is replayed fails each time
            self.failed.append(enqueued)

    def raise_failure(self) -> None:
        """That of the oldest call that failed after it had returned, if there is one; once."""
        with contextlib.suppress(IndexError):  # another thread has raised it
            enqueued = self.failed.popleft()
            error, outcome = error_of(enqueued.body)
            error.message = f"an earlier call on the GPU, {enqueued.op}, failed: {error.message}"
            error.args = (error.message,)
            error.facts = {**error.facts, "is_earlier": True}
            error.report = self.failed_report(enqueued, outcome)  # type: ignore[attr-defined]
            raise error

    def error_of(self, enqueued: Sent) -> LayerZeroError | None:
        """Why a call failed that is done on the GPU; None for one that has not. Waits for the broker's answer, which
        may come after that, and for what it has said since."""
        self._link.wait(enqueued)
        self._ask("ping")
        if enqueued.error is not None or enqueued.header is None or enqueued.header.kind != _FAILED:
            return enqueued.error
        error, outcome = error_of(enqueued.body)
        error.report = self.failed_report(enqueued, outcome)  # type: ignore[attr-defined]
        return error

    def report_of(self, enqueued: Enqueued) -> SelectionReport:
        """As far as it is known: waits until a worker has taken it, not for the GPU. Raises the link's error."""
        report = self.plain_report(enqueued)
        return with_note(report, self.deaths.note_of(enqueued))

    def plain_report(self, enqueued: Enqueued) -> SelectionReport:
        """As `report_of`, without its capsule."""
        decision = None
        if isinstance(enqueued, OnRing):
            self._wait_taken(enqueued, enqueued.lane)
            decision = enqueued.lease.decision
        elif isinstance(enqueued, Sent):
            self._link.wait(enqueued)
            self._link.read_nowait()
        if enqueued.error is not None:
            raise enqueued.error
        header, body, note = enqueued.header, enqueued.body, enqueued.gpu.transport_note
        attempts: Sequence[Any] = ()
        kernel_ns, is_replayed = 0, False
        if header is not None:
            if header.kind == _FAILED:
                return failure_of(enqueued.op, enqueued.copies, enqueued.start_ns, error_of(body)[1])
            if header.flags & wire.HAS_OUTCOME:
                outcome = messages.decode(body, messages.Outcome)
                attempts, note = outcome.attempts, "; ".join(filter(None, (waited(outcome), note)))
            decision, kernel_ns = enqueued.route.decisions[header.aux], header.time
            is_replayed = bool(header.flags & wire.REPLAYED)
        elif isinstance(enqueued, OnRing):
            is_replayed = enqueued.lane.status(enqueued.call) == ring_words.REPLAYED
        assert decision is not None
        if is_replayed:
            note += _REPLAYED
        record = (
            enqueued.route.plan,
            enqueued.copies,
            enqueued.start_ns,
            enqueued.end_ns,
            kernel_ns,
            attempts,
            decision,
            (),
            note,
        )
        report = report_of(record)
        assert report is not None
        out, why = enqueued.stays_out, enqueued.route.not_lifted
        said = (*((out,) if out else ()), *((f"not lifted: {why}",) if why else ()))
        return replace(report, notes=(*report.notes, *said)) if said else report

    def _wait_taken(self, enqueued: Enqueued, lane: GpuLane) -> None:
        while True:
            if lane.is_closed:
                return  # with the session, which waits for what is enqueued
            self._link.read_nowait()
            status = lane.status(enqueued.call)
            if enqueued.header is not None or status in (ring_words.ENQUEUED, ring_words.REPLAYED):
                return
            if enqueued.gpu.order.page.is_done(enqueued.point) and status != ring_words.LEFT:
                return  # its slot has a later call by now
            if self._link.lost is not None:
                enqueued.error = self._link.gone(None)
                return
            time.sleep(LOOK_S)
