"""One connection to a broker: frames out, answers in, shared by all threads of a process.

No thread of its own: whoever waits first reads for all (leader and followers), so that a lone caller pays for no
hand-over. The control socket's hang-up says that the broker is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zmq

from layerzero.client.connection import arena, retained
from layerzero.client.connection.counters import Counters
from layerzero.client.connection.showing import ANSWERS, Shown, answers
from layerzero.ipc.errors import BrokerLost, Busy, Cancelled, LayerZeroError, NotConnected, ProtocolError, from_wire
from layerzero.ipc.transport import control, messages, sockets, wire
from layerzero.ipc.transport.counter_messages import AddCounters
from layerzero.ipc.transport.hello import reach
from layerzero.ipc.transport.wire import HEADER_BYTES, Header, Kind

CONTROL_TIMEOUT_S = 10.0
GRACE_S = 10.0  # for a broker that was asked whether it is there
_NOBLOCK, _DECISION, _LEASE = int(zmq.NOBLOCK), int(Kind.DECISION), int(Kind.LEASE)  # enums are slow
_RELEASED, _FAILED = int(Kind.RELEASED), int(Kind.FAILED)
_POLLRDHUP = getattr(select, "POLLRDHUP", 0x2000)


class Pending:
    """A call or request that is waited for. `hold` keeps lent memory alive until the answer is here."""

    __slots__ = ("body", "error", "event", "header", "hold", "is_done", "on_done", "patience_s")

    def __init__(self, hold: Any = None, patience_s: float | None = None) -> None:
        self.hold = hold
        self.patience_s = patience_s  # how long the broker may say nothing before it is asked; None: its own default
        self.is_done = False
        self.header: Header | None = None
        self.body = b""
        self.error: LayerZeroError | None = None
        self.event: threading.Event | None = None
        self.on_done: Callable[[], None] | None = None

    def finish(self) -> None:
        self.is_done = True
        self.hold = None
        if self.event is not None:
            self.event.set()
        if self.on_done is not None:
            self.on_done()


class Link:
    """Raises BrokerLost from every method once the broker is gone, NotConnected once it was closed. `key`: the secret
    that both must know."""

    def __init__(
        self,
        path: Path,
        package: str,
        on_decision: Callable[[Header, bytes], None],
        on_lease: Callable[[Header, bytes], None],
        key: bytes | None = None,
    ) -> None:
        hello = messages.Hello(protocols=[wire.PROTOCOL], role="client", package=package, pid=os.getpid())
        try:
            self._control, answer = reach(path, hello, key, timeout_s=CONTROL_TIMEOUT_S)
        except control.Closed:
            raise BrokerLost("the broker hung up before it said hello") from None
        self._control_lock = threading.Lock()
        self.welcome = answer
        self._has_joined = answer.has_joined
        self.forks = arena.forks  # this object belongs to one process
        self.lost: LayerZeroError | None = None
        self._on_decision = on_decision
        self._on_lease = on_lease
        self.on_late: Callable[[Header, bytes], None] | None = None  # answers to calls that were answered before
        self._context = zmq.Context()
        self._dealer = sockets.connect_dealer(self._context, answer.endpoint, answer.identity, 4 * answer.max_in_flight)
        self._lock = threading.Lock()  # the dealer
        self._turn: dict[str, int] = {}  # "reader" -> the thread that reads for all
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(sockets.poll_fd(self._dealer), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(self._control, _POLLRDHUP)
        self._pending: dict[int, Pending] = {}
        self._waiting: dict[int, threading.Event] = {}
        self._lent: dict[int, Any] = {}  # memory that a worker out of reach may write to, by call
        self.numbers = itertools.count(1)
        self._heard = 0  # frames so far
        self._refused = ""  # what it refused last, of what it was shown
        self._is_closed = False
        add = weakref.WeakMethod(self._add_counters)  # no cycle: a link that nobody has goes at once

        def show(fd: int) -> None:
            known = add()
            if known is None:
                raise NotConnected("the connection is gone")
            known(fd)

        self.counters = Counters(show if answer.counts else None)
        _links.add(self)

    @property
    def is_alive(self) -> bool:
        """False once the broker has hung up."""
        if self.lost is not None or self.forks != arena.forks:
            return False
        hung_up = select.poll()
        hung_up.register(self._control, _POLLRDHUP)
        return not hung_up.poll(0)

    def send(self, frame: bytes) -> None:
        """Send a frame that has no answer."""
        with self._lock:
            self._send(frame)

    def reserve(self) -> int:
        """A sequence number for a call that the broker may answer although it was not sent to it."""
        return next(self.numbers)

    def submit(self, pending: Pending, make_frame: Callable[[int], bytes]) -> int:
        """Send a frame whose answer finishes `pending`; `make_frame` gets the sequence number.

        Raises Busy when as many answers as the broker allows open calls are outstanding, unread ones included: who
        submits without ever waiting would fill both queues.
        """
        if len(self._pending) >= self.welcome.max_in_flight:
            self.read_nowait()
            if len(self._pending) >= self.welcome.max_in_flight:
                limit = self.welcome.max_in_flight
                raise Busy(f"{len(self._pending)} calls are open; allowed: {limit}; wait for some", limit=limit)
        seq = next(self.numbers)
        frame = make_frame(seq)
        self._pending[seq] = pending
        try:
            with self._lock:
                self._send(frame)
        except LayerZeroError:  # nothing was sent. After an interrupt something may have been: then the entry stays
            self._pending.pop(seq, None)
            raise
        return seq

    def abandon(self, seq: int) -> None:
        """Nobody waits for a call any more, and there may be no answer. Its memory is kept until the broker has read
        what it was sent so far: that memory is given up it hears by the other socket, perhaps earlier."""
        pending = self._pending.get(seq)
        if pending is not None:
            self.submit(Pending(pending.hold), _ping)
            self._pending.pop(seq, None)

    def _send(self, frame: bytes) -> None:
        if self.lost is not None:
            raise _again(self.lost)
        try:
            self._dealer.send(frame, _NOBLOCK)
        except zmq.Again:
            raise Busy("the broker does not keep up with this process's messages; wait for some answers") from None
        if self._turn and sockets.has_input(self._dealer):
            os.eventfd_write(self._wake, 1)  # sending consumed the edge that the reader waits for

    def wait(self, pending: Pending, until_s: float = math.inf) -> bool:
        """Return when `pending` is done, or at `until_s` on the monotonic clock; says whether it is done."""
        if self.forks != arena.forks and not pending.is_done:
            raise BrokerLost("the call was submitted before a fork, and its answer goes to the parent; call again here")
        while not pending.is_done:
            try:
                if self._take_turn():
                    self._read_until(pending, until_s)
                    return pending.is_done
            finally:
                self._end_turn()
            event = pending.event = pending.event or threading.Event()
            self._waiting[id(pending)] = event
            try:
                if not pending.is_done and self._turn:
                    event.wait(None if until_s == math.inf else max(until_s - time.monotonic(), 0.0))
                    event.clear()
            finally:
                self._waiting.pop(id(pending), None)
                self._wake_another()  # this thread may have been woken to read, and be done
            if time.monotonic() >= until_s:
                return pending.is_done
        return True

    def read_nowait(self) -> None:
        """Take the answers that are here, unless a thread is reading anyway."""
        if self.forks != arena.forks or self.lost is not None:
            return
        try:
            if self._take_turn():
                if self.is_alive:
                    with self._lock:
                        self._drain()
                else:
                    self._lose()
        finally:
            self._end_turn()

    def _take_turn(self) -> bool:
        """Become the one thread that reads for all, if there is none. Pair with `_end_turn` in a finally: the dict
        says by itself who reads, so an interrupt between the two leaves no turn that nobody ends."""
        me = threading.get_ident()
        return self._turn.setdefault("reader", me) == me

    def _end_turn(self) -> None:
        if self._turn.get("reader") == threading.get_ident():
            del self._turn["reader"]
            self._wake_another()

    def _wake_another(self) -> None:
        """Whoever stops reading or waiting calls this: while anyone waits, someone reads or is awake."""
        if not self._turn:
            for event in list(self._waiting.values()):
                event.set()
                return

    def _read_until(self, pending: Pending, until_s: float) -> None:
        """A broker that is silent for longer than `pending` is patient is asked for a sign of life; one that gives none
        within GRACE_S counts as lost. Calls may take longer than that, since others may be before them."""
        patience_s = self.welcome.timeout_s if pending.patience_s is None else float(pending.patience_s)
        heard, due_s, is_asked = self._heard, time.monotonic() + patience_s, False
        while not pending.is_done:
            with self._lock:
                self._drain(pending)
            now_s = time.monotonic()
            if pending.is_done or now_s >= until_s:
                return
            if self._heard != heard:
                heard, due_s, is_asked = self._heard, now_s + patience_s, False
            elif now_s >= due_s and is_asked:
                self._lose(self._unresponsive(patience_s + GRACE_S))
                return
            elif now_s >= due_s:
                self._ask_for_a_sign()
                due_s, is_asked = now_s + GRACE_S, True
            for fd, events in self._poll.poll(1e3 * (min(due_s, until_s) - now_s)):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif fd == self._control.fileno() and events:
                    self._lose()

    def _ask_for_a_sign(self) -> None:
        with self._lock, contextlib.suppress(LayerZeroError):  # a full queue, or a session that is being closed
            self._send(_ping(next(self.numbers)))

    def _unresponsive(self, silent_s: float) -> BrokerLost:
        return BrokerLost(
            f"the broker (pid {self.welcome.broker_pid}) has said nothing for {silent_s:.3g} s, although it was asked. "
            "If it was stopped, let it go on, or end it with lz down --force; lz.connect() then starts another"
        )

    def _drain(self, until: Pending | None = None) -> None:
        """Take what is there; may stop early when `until` is done."""
        if sockets.has_input(self._dealer):
            try:
                while until is None or not until.is_done:
                    self._take(self._dealer.recv(_NOBLOCK))
            except zmq.Again:
                return

    def _take(self, frame: bytes) -> None:
        self._heard += 1
        header = wire.unpack(frame)
        if header.kind == _DECISION:
            self._on_decision(header, frame[HEADER_BYTES:])
            return
        if header.kind == _LEASE:
            self._on_lease(header, frame[HEADER_BYTES:])
            return
        if header.kind == _RELEASED:
            self._lent.pop(header.seq, None)
            return
        pending = self._pending.get(header.seq)
        if pending is not None:
            if header.kind == _FAILED and header.flags & wire.STILL_LENT:
                self._lent[header.seq] = pending.hold
            pending.header = header
            pending.body = frame[HEADER_BYTES:]
            pending.finish()
            self._pending.pop(header.seq, None)  # last, so that an interrupt loses no answer
        elif self.on_late is not None:
            self.on_late(header, frame[HEADER_BYTES:])

    def _lose(self, unresponsive: BrokerLost | None = None) -> None:
        """The broker hung up, or is as good as gone: what it still said counts, the rest is lost."""
        reason = unresponsive or self._last_word()
        is_closed = self.lost is not None
        with self._lock:
            if not self._dealer.closed:  # `close` may have been through since the caller looked
                self._drain()
            self.lost = self.lost or reason
            left = list(self._pending.values())
            self._pending.clear()
            lent = list(self._lent.values())
            self._lent.clear()
        for hold in lent:  # nobody will say when it is released
            retained.quarantine(hold, is_broker_dead=False)
        for pending in left:
            is_dead = not is_closed and unresponsive is None and self._ends_workers(reason)
            retained.quarantine(pending.hold, is_broker_dead=is_dead)
            pending.error = Cancelled("the session was closed before the call ended") if is_closed else _again(reason)
            pending.finish()

    def watch_hang_up(self, poll: select.poll) -> None:
        """Let `poll` return when the broker hangs up; then ask `gone`."""
        poll.register(self._control, _POLLRDHUP)

    @property
    def hang_up_fd(self) -> int:
        """As `watch_hang_up`, by POLLRDHUP of this descriptor; -1 once it is closed."""
        return self._control.fileno()

    def gone(self, hold: Any) -> LayerZeroError:
        """What a call ends in that was on an express lane when the broker hung up. A worker may still write to it."""
        while self.lost is None:
            self.read_nowait()
            if self.lost is None:
                time.sleep(0.0005)  # another thread reads; the hang-up has woken it
        is_closed = isinstance(self.lost, NotConnected)
        retained.quarantine(hold, is_broker_dead=self._ends_workers(self.lost))
        return Cancelled("the session was closed before the call ended") if is_closed else _again(self.lost)

    def _ends_workers(self, reason: LayerZeroError | None) -> bool:
        """Whether the kernel ends all workers with the broker. Joined ones end when they see it, which a paused
        container does not."""
        return isinstance(reason, BrokerLost) and not self._has_joined

    def note_joined(self) -> None:
        """Calls may go to workers that join, which the broker did not know of when it said welcome."""
        self._has_joined = True

    def check_alive(self) -> None:
        """Raises BrokerLost when the broker says nothing, although it is asked."""
        pending = Pending(patience_s=0.0)
        self.submit(pending, _ping)
        self.wait(pending)
        if pending.error is not None:
            raise pending.error

    def _last_word(self) -> LayerZeroError:
        try:
            while True:
                said, came = control.receive(self._control, *ANSWERS)
                _close_all(came)
                if isinstance(said, messages.Refused):
                    return self._heard_refusal(said)
        except (control.Closed, ProtocolError, OSError):  # it just went
            told = f" (it last refused: {self._refused})" if self._refused else ""  # another thread may have read why
            who = f"the broker (pid {self.welcome.broker_pid})"
            return BrokerLost(f"{who} is gone{told}; lz.connect() starts or finds another")

    def _heard_refusal(self, said: messages.Refused) -> LayerZeroError:
        error = from_wire(said.error)
        self._refused = error.message
        return error

    def add_arena(self, number: int, fd: int, nbytes: int) -> None:
        """Show the broker an arena; returns when it knows it."""
        self._show(messages.AddArena(arena=number, nbytes=nbytes), (fd,))

    def add_gpu(self, message: messages.AddGpu, fds: tuple[int, ...]) -> None:
        """Make an offer of memory on a GPU, with the page that orders calls; returns when the broker knows it."""
        self._show(message, fds)

    def add_gpu_arena(self, message: messages.AddGpuArena, fds: tuple[int, ...]) -> None:
        """As `add_arena`, of memory on a GPU."""
        self._show(message, fds)

    def add_lane(self, number: int, fd: int, gpu: str = "") -> list[int] | None:
        """Show the broker the page of an express lane; on a GPU its ring. Returns the bells, none of them when others
        took this process's last file descriptors meanwhile; None when the lane's worker is gone. Raises OSError when
        there are no descriptors left for them, before the broker hears of it."""
        count = 1 if gpu else 2
        _check_room(fd, count)
        answer, bells = self._show(messages.AddLane(lane=number, gpu=gpu), (fd,))
        assert isinstance(answer, messages.LaneAdded | None)
        if answer is not None and len(bells) != (count if answer.is_open else 0):
            _close_all(bells)
            raise ProtocolError(f"lane {number} comes with {len(bells)} bells; needed: {count}")
        return bells if answer is None or answer.is_open else None

    def _add_counters(self, fd: int) -> None:
        self._show(AddCounters(), (fd,))

    def get_lifted(self, digest: str) -> tuple[int, int] | None:
        """A descriptor of a lifted call or of machine code, by digest, and its bytes; the caller closes it. None when
        there are no descriptors left for it. Raises what the broker refuses it with."""
        answer, came = self._show(messages.GetLifted(digest=digest), ())
        if answer is None:
            return None
        assert isinstance(answer, messages.LiftedGiven)
        if len(came) != 1:
            _close_all(came)
            raise ProtocolError(f"{digest:.80} comes with {len(came)} descriptors; needed: 1")
        return came[0], answer.nbytes

    def _show(self, shown: Shown, fds: tuple[int, ...]) -> tuple[messages.Message | None, list[int]]:
        """Send descriptors to the broker and wait for the answer to them. Returns it and the descriptors that came with
        it; no answer when there were none left for those."""
        with self._control_lock:
            if self.lost is not None:
                raise _again(self.lost)
            try:
                control.send(self._control, shown, fds)
                while True:
                    answer, came = control.receive(self._control, *ANSWERS)
                    if isinstance(answer, messages.Refused):
                        raise self._heard_refusal(answer)
                    if answers(answer, shown):
                        return answer, came
                    _close_all(came)  # a late answer to one that was given up
            except control.NoDescriptors:
                return None, []
            except control.Closed:
                if self.lost is not None:  # `close` of another thread: it is we who have hung up
                    raise _again(self.lost) from None
                raise self._last_word() from None
            except TimeoutError:
                text = f"the broker (pid {self.welcome.broker_pid}) has not answered for {CONTROL_TIMEOUT_S:g} s"
                raise BrokerLost(text) from None

    def retire_arena(self, number: int) -> None:
        with self._control_lock, contextlib.suppress(control.Closed, OSError):  # a lost broker holds no arena
            control.send(self._control, messages.RetireArena(arena=number))

    def close(self) -> None:
        """Hang up. Calls that are open end as Cancelled for those who wait."""
        if self._is_closed or self.forks != arena.forks:  # a fork's copy: the sockets are the parent's
            return
        self._is_closed = True
        if self.lost is None:
            self.lost = NotConnected("the session was closed; lz.connect() opens another")
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            while not self._take_turn():  # the hang-up has woken the thread that reads
                time.sleep(0.0005)
            self._lose()
        finally:
            self._end_turn()
        with self._control_lock, self._lock:
            self._dealer.close()
            self._control.close()
        self._context.term()
        os.close(self._wake)


def _ping(seq: int) -> bytes:
    return wire.pack(Kind.REQUEST, seq=seq, body=messages.encode(messages.Request(method="ping", params={})))


def _check_room(fd: int, count: int) -> None:
    """Raises OSError when there are not so many file descriptors left."""
    spare: list[int] = []
    try:
        for _ in range(count):
            spare.append(os.dup(fd))
    finally:
        _close_all(spare)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _again(error: LayerZeroError) -> LayerZeroError:
    """A fresh exception with the same content: one object must not be raised in several threads."""
    copy = type(error)(error.message)
    copy.facts = dict(error.facts)
    return copy


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork() -> None:
    """The sockets are the parent's. Closing ZeroMQ's would disturb it; keeping the control socket open would hide its
    death from the broker."""
    for link in list(_links):
        link._control.close()
        retained.keep(link)


os.register_at_fork(after_in_child=_after_fork)
