"""Objects that workers hold for this process: who has them here, and when they are released there."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from layerzero.client.facade import default_session
from layerzero.client.session.session import Session
from layerzero.functions.calling import Exchange
from layerzero.functions.environment import FunctionEnv
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, NotConnected
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame, Reference

MAX_RELEASED = 256  # with one frame
_log = logging.getLogger("layerzero.functions")


class _Place(NamedTuple):
    """Where an object is, for who releases it."""

    session: Session
    backend: str
    env: str
    pid: int
    reference: Reference
    token: int = 0  # of a worker that is reserved for it
    is_lost: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether a release can reach it: neither from a forked child, nor over another session, nor a closed one."""
        try:
            return self.pid == os.getpid() and default_session.session() is self.session and self.session.is_alive
        except NotConnected:
            return False


class Reserved(NamedTuple):
    """A worker that is for one object alone."""

    backend: str
    token: int

    @classmethod
    def of(cls, session: Session, where: FunctionEnv) -> Reserved:
        """Raises EnvError where the environment cannot serve, and as a question to the broker does."""
        identity = session.link.welcome.identity
        try:
            found = session.ask("reserve", backend=where.backend, identity=identity)
        except LayerZeroError as exc:
            raise where.explain_failure(exc, session.ask) from exc
        return cls(str(found["backend"]), int(found["token"]))

    def free(self, session: Session) -> None:
        """Nobody needs it any more."""
        session.ask("free", backend=self.backend, token=self.token)


class Hold:
    """An object in a worker. It is released there when nobody has this any more: neither what stands for it here, nor
    a call that it was lent to."""

    __slots__ = ("__weakref__", "_finalizer", "_lent", "backend", "reference")

    def __init__(self, session: Session, backend: str, env: str, reference: Reference) -> None:
        self.reference, self.backend = reference, backend
        self._lent: weakref.WeakSet[Any] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _dropped, _Place(session, backend, env, os.getpid(), reference))
        self._finalizer.atexit = False  # what is left goes with this client
        _releases.start()

    def in_own_worker(self, reserved: Reserved) -> Hold:
        """The same object, whose worker is for it alone."""
        found = self._finalizer.detach()
        assert found is not None
        self._finalizer = weakref.finalize(self, _dropped, found[2][0]._replace(token=reserved.token))
        self._finalizer.atexit = False
        return self

    def note_lent(self, loan: Any) -> None:
        """A loan, which holds this as well."""
        self._lent.add(loan)

    def lose(self) -> None:
        """It is not there any more."""
        found = self._finalizer.detach()
        if found is not None and found[2][0].token:
            _dropped(found[2][0]._replace(is_lost=True))

    def release(self, timeout_s: float | None) -> None:
        """Release it now, or when the last call that it was lent to has ended. An error is logged: in a `with` block it
        would hide another one."""
        if len(self._lent):
            return
        found = self._finalizer.detach()
        if found is None:
            return
        place: _Place = found[2][0]
        try:
            if place.is_ours:
                _release(place.session, place.backend, place.env, [place.reference], timeout_s)
                _free([place])
        except LayerZeroError as exc:
            _log.warning("an object in %s is not released: %s", place.env, exc.message)


class Lent:
    """A hold that a call was lent."""

    __slots__ = ("__weakref__", "_hold", "_stay")

    def __init__(self, stay: Stay, hold: Hold) -> None:
        self._stay, self._hold = stay, hold

    @property
    def reference(self) -> Reference:
        return self._hold.reference

    @property
    def backend(self) -> str:
        """The worker that it is in."""
        return self._hold.backend

    def rebuild(self) -> bool:
        """As calling.Loan."""
        return self._stay.rebuild(self._hold)


class Stay:
    """Something of this process that has an object in a worker, until it is closed. Threads may share it."""

    def __init__(self, label: str, where: FunctionEnv) -> None:
        self.label, self._env = label, where
        self._lock = threading.RLock()
        self._hold: Hold | None = None
        self._backend = where.backend

    @property
    def maker(self) -> tuple[Any, Any, Any] | None:
        """The owner that would construct it again, and its arguments; None where that is not kept."""
        return None

    @property
    def is_closed(self) -> bool:
        return self._hold is None

    @property
    def backend(self) -> str:
        """The worker that its object is in, or was."""
        hold = self._hold
        if hold is not None:
            self._backend = hold.backend
        return self._backend

    def take(self, hold: Hold) -> None:
        """Have it from now on."""
        self._hold = hold

    def lend(self) -> Lent:
        """To a call. Raises InvalidArgument once it is closed."""
        with self._lock:
            hold = self._hold
            if hold is None:
                raise InvalidArgument(f"{self.label}: this object is closed; construct another one")
            lent = Lent(self, hold)
            hold.note_lent(lent)
        return lent

    def lend_to(self, backends: Sequence[str]) -> Lent:
        """To a call that one of these may serve. Raises InvalidArgument where the object's own worker may not, too."""
        lent = self.lend()
        if lent.backend not in backends:
            text = f"{self.label}: its object is in {lent.backend}, and the call is of {', '.join(backends)}"
            raise InvalidArgument(f"{text}; objects are arguments in their own environment, and in their own worker")
        return lent

    def lose(self) -> None:
        """The worker has let go of it."""
        with self._lock:
            hold, self._hold = self._hold, None
        if hold is not None:
            hold.lose()

    def drop(self) -> None:
        """As close, and wait for nobody."""
        with self._lock:
            self._hold = None

    def rebuild(self, lost: Hold) -> bool:
        """As calling.Loan; nothing is done where another thread has."""
        return False

    def close(self, timeout_s: float | None) -> None:
        """Release the object there; nothing where that has been done, or where it is lost. Calls that were sent before
        have it until they have ended."""
        with self._lock:
            hold, self._hold = self._hold, None
        if hold is not None:
            hold.release(timeout_s)


def _release(
    session: Session, backend: str, env: str, references: list[Reference], timeout_s: float | None = None
) -> None:
    exchange = Exchange(session, (backend,), "release", env)
    frame = Frame([frames.RELEASE, [one.place for one in references]])
    error = session.run(exchange.request(frame, timeout_s=timeout_s)).error
    if error is not None:
        raise error


def _free(places: Sequence[_Place]) -> None:
    """The workers that were reserved for what was there."""
    for place in places:
        if place.token and place.is_ours:
            Reserved(place.backend, place.token).free(place.session)


class _Releases:
    """The objects that nobody has any more, and the thread that releases them. A finalizer may run anywhere, so that it
    only notes them."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Place] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lz-objects", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._send(self._taken())

    def _taken(self) -> list[_Place]:
        places = [self.queue.get()]
        while len(places) < MAX_RELEASED and not self.queue.empty():
            places.append(self.queue.get())
        return places

    def _send(self, places: list[_Place]) -> None:
        by_backend: defaultdict[tuple[Session, str, str], list[Reference]] = defaultdict(list)
        try:
            for place in places:
                if place.is_ours and not place.is_lost:
                    by_backend[place.session, place.backend, place.env].append(place.reference)
            for (session, backend, env), references in by_backend.items():
                _release(session, backend, env, references)
            _free(places)
        except Exception as exc:  # the worker's death, for one; what is left goes with this client
            if any(place.is_ours for place in places):
                _log.warning("objects that nobody has any more are not released: %s", exc)


_releases = _Releases()


def _dropped(place: _Place) -> None:
    """A finalizer."""
    if place.pid == os.getpid():
        _releases.queue.put(place)


def _forked() -> None:
    global _releases
    _releases = _Releases()


os.register_at_fork(after_in_child=_forked)
