"""Objects of isolated classes: proxies here, whose objects live in a worker of an environment."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from layerzero.client.connection.report import Copy
from layerzero.client.facade import default_session
from layerzero.client.session.session import Session
from layerzero.functions.calling import MIN_ROOM, Arguments, Exchange, ObjectLost
from layerzero.functions.environment import FunctionEnv
from layerzero.functions.isolated import Call, FunctionFuture, FunctionReport, Options, options_of
from layerzero.ipc.errors import BackendError, InvalidArgument, LayerZeroError, NotConnected, RemoteError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code, Frame

ON_DEATH = ("error", "rebuild")
MAX_REBUILDS = 3  # in one call
MAX_RELEASED = 256  # with one frame
_log = logging.getLogger("layerzero.functions")


class IsolatedClass:
    """A class whose objects live in an environment: called as ever, it gives a proxy of one. Threads may share it, and
    its proxies."""

    def __init__(self, cls: type, where: FunctionEnv, options: Options, code: Code, on_death: str) -> None:
        """Raises InvalidArgument."""
        if on_death not in ON_DEATH:
            raise InvalidArgument(f"lz.isolated: on_death is {on_death!r:.80}; allowed: {', '.join(ON_DEATH)}")
        if options.fallback is not None:
            raise InvalidArgument("lz.isolated: fallback is for functions; an object has its state there alone")
        self._class, self._env, self._options, self._code, self._on_death = cls, where, options, code, on_death
        self._tree = code.to_tree()
        self._room = MIN_ROOM
        self._last = threading.local()
        self._methods: dict[str, inspect.Signature | None] = {}  # those that were called
        self._proxy = _proxy_class(cls)
        functools.update_wrapper(self, cls, updated=())

    @property
    def env(self) -> FunctionEnv:
        return self._env

    @property
    def _label(self) -> str:
        return f"{self._code.module}.{self._code.qualname}"

    def __repr__(self) -> str:
        return f"<lz.isolated class {self._label} in {self._env.backend}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A proxy of an object that is constructed in the environment. Arrays are copied there, since it may keep them.

        Raises as a call of a function does, and InvalidArgument where 1,024 objects of this program are there.
        """
        self._bind(self._label, _signature(self._class), args, kwargs)
        return self._proxy(Remote(self, args, kwargs))

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, (self._proxy, self._class))

    def __mro_entries__(self, _: Any) -> Any:
        name = self._code.qualname
        raise InvalidArgument(f"{name} is isolated and has no subclasses; decorate the class that is to be constructed")

    def __getattr__(self, name: str) -> Any:
        if name == "_code" or name.startswith("__"):
            raise AttributeError(name)
        text = f"{self._code.qualname}.{name}: of an isolated class, only objects have attributes and methods"
        raise AttributeError(f"{text}; {self._code.qualname}.__wrapped__ is the class of this process")

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """An object here, in this process, with what is installed here."""
        return self._class(*args, **kwargs)

    def options(self, **changes: Any) -> IsolatedClass:
        """The same class with other options: timeout_s, idempotent, on_death. Raises InvalidArgument."""
        on_death = changes.pop("on_death", self._on_death)
        options = options_of(replace, self._options, **changes)
        return IsolatedClass(self._class, self._env, options, self._code, on_death)

    def warmup(self) -> float:
        """Start the worker and import the class's module there. Returns seconds. Raises as a call does."""
        start_s = time.monotonic()
        Call(self, None, (), {}, self._options).finish()
        return time.monotonic() - start_s

    def last_report(self) -> FunctionReport:
        """Of this thread's last call of any of its objects. Raises InvalidArgument before the first one."""
        call: Call | None = getattr(self._last, "call", None)
        if call is None:
            raise InvalidArgument(f"{self._label}: call it first; this thread has not yet")
        assert call.report is not None
        return call.report

    def _bind(self, label: str, signature: inspect.Signature | None, args: Any, kwargs: Any) -> None:
        if signature is None:
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise InvalidArgument(f"{label}: {exc}") from None

    def _demand_fit(self, name: str, args: Any, kwargs: Any) -> None:
        """Raises InvalidArgument for arguments that a method does not take."""
        if name not in self._methods:
            self._methods[name] = _signature(getattr(self._class, name))
        own = isinstance(_defined(self._class, name), (staticmethod, classmethod))
        self._bind(f"{self._label}.{name}", self._methods[name], args if own else (None, *args), kwargs)


def _signature(target: Any) -> inspect.Signature | None:
    """None for what has none, or one that says nothing."""
    if not (inspect.isroutine(target) or isinstance(target, type)):
        return None
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


class Remote:
    """An object in a worker: where it is, and how it is had again."""

    def __init__(self, owner: IsolatedClass, args: Any, kwargs: Any) -> None:
        """Constructs it. Raises as a call does."""
        self.owner = owner
        self._again = (args, kwargs) if owner._on_death == "rebuild" else None
        self._lock = threading.RLock()
        self._is_closed = False
        self._construct(args, kwargs)

    def _construct(self, args: Any, kwargs: Any) -> None:
        call = Construction(self.owner, Arguments(args, kwargs), args, kwargs, self.owner._options)
        session = call.session
        found = call.finish()
        if not (isinstance(found, list) and [type(item) for item in found] == [int, int]):
            text = f"{self.owner._label} in {self.owner._env.name}: its worker's answer is no reference: {found!r:.100}"
            raise BackendError(text, backend=self.owner._env.backend)
        self._reference: list[int] = found
        place = _Place(session, self.owner._env.backend, self.owner._env.name, os.getpid(), tuple(found))
        self._finalizer = weakref.finalize(self, _dropped, place)
        self._finalizer.atexit = False  # what is left goes with this client
        _releases.start()

    @property
    def reference(self) -> list[int]:
        """Raises InvalidArgument once it is closed."""
        if self._is_closed:
            raise InvalidArgument(f"{self.owner._label}: this object is closed; construct another one")
        return self._reference

    def rebuild(self, lost: list[int]) -> bool:
        """Construct it again, unless another thread has. False where that is not wanted. Raises as a call does."""
        if self._again is None:
            return False
        with self._lock:
            if self.reference == lost:
                self._finalizer.detach()
                self._construct(*self._again)
        return True

    def call(self, how: int, name: str, args: Any = (), kwargs: Any = None) -> Use:
        given = {} if kwargs is None else kwargs
        return Use(self, how, name, Arguments(args, given), args, given)

    def close(self) -> None:
        """Release it there; nothing where that has been done, or where it is lost."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._again = None
        found = self._finalizer.detach()
        if found is not None:
            place = found[2][0]
            try:
                if place.is_ours:
                    _release(place.session, place.backend, place.env, [place.reference], self.owner._options.timeout_s)
            except LayerZeroError as exc:  # an error in a `with` block is not to be hidden by this one
                _log.warning("%s in %s: not released: %s", self.owner._label, place.env, exc.message)


class Construction(Call):
    """The call that constructs an object."""

    @property
    def session(self) -> Session:
        return self._session

    def _frame(self, given: Arguments) -> Frame:
        _note_copies(given, "what is constructed may keep it")
        return given.frame(frames.MAKE, self.owner._tree)


class Use(Call):
    """A call of an object."""

    def __init__(self, remote: Remote, how: int, name: str, given: Arguments, args: Any, kwargs: Any) -> None:
        owner = remote.owner
        super().__init__(owner, given, args, kwargs, owner._options, f"{owner._label}.{name}")
        self._how, self._name = how, name
        self._remote: Remote | None = remote
        self._used: list[int] = []
        self._rebuilds = 0

    def _frame(self, given: Arguments) -> Frame:
        if self._how == frames.SET:
            _note_copies(given, "an object may keep what it is given")
        assert self._remote is not None
        self._used = self._remote.reference
        return given.frame(frames.USE, self._used, self._how, self._name)

    def _may_repeat(self, error: LayerZeroError) -> bool:
        if not isinstance(error, ObjectLost):
            return super()._may_repeat(error)
        if self._rebuilds == MAX_REBUILDS or self._remote is None:
            return False
        try:
            if not self._remote.rebuild(self._used):
                return False
        except LayerZeroError:
            self._note("")
            raise
        self._rebuilds += 1
        self._is_rebuilt = True
        return True

    def _note(self, served_by: str) -> None:
        super()._note(served_by)
        self._remote = None  # the report of a call keeps no object alive


def _note_copies(given: Arguments, reason: str) -> None:
    """The worker copies all arrays."""
    nbytes = given.uncopied_bytes + sum(copy.nbytes for copy in given.copies if copy.where == "client")
    if nbytes and not any(copy.where == "worker" for copy in given.copies):
        given.copies.append(Copy("an argument", nbytes, "worker", reason))
    given.uncopied_bytes = 0


class Method:
    """A method of a proxy's object: called as ever, or with `submit`."""

    def __init__(self, remote: Remote, name: str) -> None:
        self._remote, self._name = remote, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in the environment. Raises as a call of a function does."""
        return self._start(args, kwargs).finish()

    def submit(self, *args: Any, **kwargs: Any) -> FunctionFuture:
        """Send a call and return at once. Arguments must not change before it is done."""
        call = self._start(args, kwargs)
        call.send()
        return FunctionFuture(call)

    def _start(self, args: Any, kwargs: Any) -> Use:
        self._remote.owner._demand_fit(self._name, args, kwargs)
        return self._remote.call(frames.METHOD, self._name, args, kwargs)

    def __repr__(self) -> str:
        owner = self._remote.owner
        return f"<lz.isolated method {owner._label}.{self._name} in {owner._env.backend}>"


class Proxy:
    """What stands for an object of an isolated class. Its public methods, attributes and properties are the object's;
    `close()` releases it."""

    __slots__ = ("__weakref__", "_lz")
    _lz_class: type = object
    _lz: Remote

    def __init__(self, remote: Remote) -> None:
        object.__setattr__(self, "_lz", remote)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} shows no {name}: names with an underscore stay in its environment")
        if _is_method(self._lz_class, name):
            return Method(self._lz, name)
        return self._lz_attribute(frames.GET, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "close" or _is_method(self._lz_class, name):
            raise AttributeError(f"{self!r}: {name} cannot be set; public attributes and properties can")
        self._lz_attribute(frames.SET, name, value)

    def _lz_attribute(self, how: int, name: str, *args: Any) -> Any:
        try:
            return self._lz.call(how, name, args).finish()
        except RemoteError as exc:
            if exc.facts.get("type") == "AttributeError":
                raise AttributeError(str(exc.facts["message"]), name=name) from exc
            raise

    def close(self) -> None:
        """Let go of the object in the worker, after its own `close`, if it has one. A second time does nothing."""
        remote = self._lz
        try:
            if not remote._is_closed and _is_method(self._lz_class, "close"):
                Method(remote, "close")()
        finally:
            remote.close()

    def __enter__(self) -> Any:
        """What the class's own `__enter__` gives, or this proxy."""
        if not hasattr(self._lz_class, "__enter__"):
            return self
        found = self._lz.call(frames.METHOD, "__enter__").finish()
        return self if found[0] else found[1]

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        remote = self._lz
        if remote._is_closed:
            return False
        if not hasattr(self._lz_class, "__exit__"):
            self.close()
            return False
        try:
            args = () if kind is None else (f"{kind.__qualname__}: {error}",)
            return bool(remote.call(frames.METHOD, "__exit__", args).finish())
        finally:
            remote.close()

    def __dir__(self) -> list[str]:
        return sorted({"close", *(name for name in dir(self._lz_class) if not name.startswith("_"))})

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be copied or pickled: its object is in another process")

    def __repr__(self) -> str:
        owner = self._lz.owner
        return f"<lz.isolated object of {owner._label} in {owner._env.backend}>"


def _is_method(cls: type, name: str) -> bool:
    if _defined(cls, name) is None:
        return False
    found = getattr(cls, name, None)
    return callable(found) and not isinstance(found, type)


def _defined(cls: type, name: str) -> Any:
    """What a class or a base of it has under a name, its metaclass aside; None for nothing."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _proxy_class(cls: type) -> type[Proxy]:
    """With those operators that the class has: Python looks for them there."""

    def operator(name: str) -> Any:
        def run(self: Proxy, *args: Any, **kwargs: Any) -> Any:
            return Method(self._lz, name)(*args, **kwargs)

        run.__name__ = name
        return run

    held: dict[str, Any] = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__, "_lz_class": cls}
    held |= {name: operator(name) for name in frames.OPERATORS if _defined(cls, name) is not None}
    if "__getitem__" in held:
        held["__iter__"] = None  # not by numbers until an IndexError, which is a RemoteError here
    return type(cls.__name__, (Proxy,), held)


class _Place(NamedTuple):
    """Where an object is, for who releases it."""

    session: Session
    backend: str
    env: str
    pid: int
    reference: tuple[int, ...]

    @property
    def is_ours(self) -> bool:
        """Whether a release can reach it: neither from a forked child, nor over another session, nor a closed one."""
        try:
            return self.pid == os.getpid() and default_session.session() is self.session and self.session.is_alive
        except NotConnected:
            return False


def _release(session: Session, backend: str, env: str, references: list[Any], timeout_s: float | None = None) -> None:
    exchange = Exchange(session, backend, "release", env)
    frame = Frame([frames.RELEASE, [list(one) for one in references]])
    error = session.run(exchange.request(frame, timeout_s=timeout_s)).error
    if error is not None:
        raise error


class _Releases:
    """The objects whose proxies were collected, and the thread that releases them. A finalizer may run anywhere, so
    that it only notes them."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Place] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
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
        by_backend: defaultdict[tuple[Session, str, str], list[Any]] = defaultdict(list)
        try:
            for place in places:
                if place.is_ours:
                    by_backend[place.session, place.backend, place.env].append(place.reference)
            for (session, backend, env), references in by_backend.items():
                _release(session, backend, env, references)
        except Exception as exc:  # the worker's death, for one; what is left goes with this client
            if any(place.is_ours for place in places):
                _log.warning("objects whose proxies were collected are not released: %s", exc)


_releases = _Releases()


def _dropped(place: _Place) -> None:
    """A finalizer."""
    if place.pid == os.getpid():
        _releases.queue.put(place)


def _forked() -> None:
    global _releases
    _releases = _Releases()


os.register_at_fork(after_in_child=_forked)
