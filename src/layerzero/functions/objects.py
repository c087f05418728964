"""Objects of isolated classes: proxies here, whose objects live in a worker of an environment."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from layerzero.client.facade import default_session
from layerzero.functions.calling import MIN_ROOM, Arguments, Inside
from layerzero.functions.calls import SHORT_NS, UNKNOWN_NS, Call, Owner
from layerzero.functions.environment import FunctionEnv
from layerzero.functions.express import Begun
from layerzero.functions.futures import FunctionFuture
from layerzero.functions.handle import wrap_of
from layerzero.functions.held import Hold, Lent, Reserved, Stay
from layerzero.functions.isolated import NO_COUNTS, Isolated, plain_counts
from layerzero.functions.methods import Borrowed, MethodExpress
from layerzero.functions.names import look_up
from layerzero.functions.options import Options, options_of
from layerzero.functions.places import Candidate, Places
from layerzero.functions.report import FunctionReport
from layerzero.functions.streams import iterate
from layerzero.functions.use import Use
from layerzero.functions.warming import warm_up
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, RemoteError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.functions.surface import CALLABLE, COROUTINE, OF_CLASS, OPERATORS, PROPERTY, STREAM, Surface

ON_DEATH = ("error", "rebuild")


class IsolatedClass:
    """A class whose objects live in an environment: called as ever, it gives a proxy of one. Threads may share it, and
    its proxies."""

    def __init__(
        self, cls: type | None, surface: Surface, where: FunctionEnv, options: Options, code: Code, on_death: str
    ) -> None:
        """`cls`: None for one that this process does not have. Raises InvalidArgument."""
        if on_death not in ON_DEATH:
            raise InvalidArgument(f"lz.isolated: on_death is {on_death!r:.80}; allowed: {', '.join(ON_DEATH)}")
        _demand_of_objects(options)
        if options.keep:
            raise InvalidArgument("lz.isolated: keep is for functions and methods; objects stay there anyway")
        self._class, self._surface = cls, surface
        self._env, self._options, self._code, self._on_death = where, options, code, on_death
        self._places = Places([Candidate(where, code)], options.workers)
        self._room, self._kernel_ns = MIN_ROOM, UNKNOWN_NS
        self._last = threading.local()
        self._methods: dict[str, inspect.Signature | None] = {}  # those that were called
        self._functions: dict[str, ClassFunction] = {}  # likewise, by the class
        self._proxy = _proxy_class(cls, surface, code)
        self.__name__, self.__qualname__, self.__module__ = code.qualname.rpartition(".")[2], code.qualname, code.module
        if cls is not None:
            functools.update_wrapper(self, cls, updated=())

    @property
    def env(self) -> FunctionEnv:
        return self._env

    @property
    def _label(self) -> str:
        return self._code.label

    def __repr__(self) -> str:
        return f"<lz.isolated class {self._label} in {self._env.backend}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A proxy of an object that is constructed in the environment. Arrays are copied there, since it may keep them.

        Raises as a call of a function does, and InvalidArgument where 1,024 objects of this program are there.
        """
        self._bind(self._label, _signature(self._class), args, kwargs)
        return self._proxy(Remote(self, self._construct(self, args, kwargs), self, args, kwargs))

    def _construct(self, maker: Owner, args: Any, kwargs: Any, backend: str = "") -> Hold:
        """A new object, by the class or a method of it. `backend`: where it was before; a worker of its own is another
        one then."""
        if self._options.process == "pool" or maker is not self:
            backends = (backend,) if backend else self._places.backends
            given = Arguments(args, kwargs, backends, device=maker._options.device)
            found: Hold = Call(maker, given, args, kwargs, maker._options, wrap=_held).finish()
            return found
        session = default_session.session()
        reserved = Reserved.of(session, self._env)
        try:
            given = Arguments(args, kwargs, (reserved.backend,), device=maker._options.device)
            wrap = functools.partial(_held, reserved=reserved)
            found = Call(maker, given, args, kwargs, maker._options, wrap=wrap).finish()
        except BaseException:
            with contextlib.suppress(LayerZeroError):
                reserved.free(session)
            raise
        return found

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._proxy) or (self._class is not None and isinstance(value, self._class))

    def __mro_entries__(self, _: Any) -> Any:
        name = self._code.qualname
        raise InvalidArgument(f"{name} is isolated and has no subclasses; decorate the class that is to be constructed")

    def __getattr__(self, name: str) -> Any:
        """A method of the class, called without an object or with one as its first argument, or an attribute's value as
        it is in the environment. Raises AttributeError, and as a call does."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} shows no {name}: names with an underscore stay there")
        bits, code = self._surface.names.get(name), self._code.of(f"{self._code.qualname}.{name}")
        if bits is None or bits & PROPERTY:
            why = f"{self._code.qualname} has no {name}" if bits is None else f"{code.qualname} is an object's"
            raise AttributeError(f"{why}; {self._code.qualname}.__wrapped__ is the class of this process")
        if bits & CALLABLE:
            if name not in self._functions:
                function = None if self._class is None else getattr(self._class, name)
                made = ClassFunction(self, function, self._env, self._options, code, bits)
                self._functions.setdefault(name, made)
            return self._functions[name]
        match look_up(code, self._env, self._options):
            case [frames.VALUE, value]:
                return value
            case [frames.CLASS, Surface() as surface] if self._class is None:
                return IsolatedClass(None, surface, self._env, self._options, code, "error")
        raise AttributeError(f"{code.qualname} is neither a method nor a value that can come here")

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """An object here, in this process, with what is installed here."""
        if self._class is None:
            raise InvalidArgument(f"{self._label} is a class of its environment alone")
        return self._class(*args, **kwargs)

    def options(self, **changes: Any) -> IsolatedClass:
        """The same class with other options: timeout_s, idempotent, on_death, workers, process, device. Raises
        InvalidArgument."""
        on_death = changes.pop("on_death", self._on_death)
        options = options_of(replace, self._options, **changes)
        changed = IsolatedClass(self._class, self._surface, self._env, options, self._code, on_death)
        changed._last = self._last
        return changed

    def warmup(self) -> float:
        """Start the workers and import the class's module there. Returns seconds. Raises as a call does."""
        return warm_up(self)

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

    def _plain_counts_of(self, name: str) -> range:
        """So many arguments of a method fit without a look; none where each call needs one."""
        bits = self._surface.names.get(name, 0)
        signature = None if self._class is None else _signature(getattr(self._class, name, None))
        if signature is None or bits & (STREAM | COROUTINE):
            return NO_COUNTS
        counts = plain_counts(signature)
        return counts if bits & OF_CLASS or not counts else range(max(counts.start - 1, 0), counts.stop - 1)

    def _demand_fit(self, name: str, args: Any, kwargs: Any) -> None:
        """Raises InvalidArgument for arguments that a method does not take."""
        if name not in self._methods:
            self._methods[name] = None if self._class is None else _signature(getattr(self._class, name))
        own = self._surface.names.get(name, 0) & OF_CLASS
        self._bind(f"{self._label}.{name}", self._methods[name], args if own else (None, *args), kwargs)


def _signature(target: Any) -> inspect.Signature | None:
    """None for what has none, or one that says nothing."""
    if not (inspect.isroutine(target) or isinstance(target, type)):
        return None
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


class ClassFunction(Isolated[Any, Any]):
    """A method of an isolated class, called by the class. An object of the class that it returns is a proxy."""

    def __init__(
        self, of: IsolatedClass, function: Any, where: FunctionEnv, options: Options, code: Code, bits: int
    ) -> None:
        """`bits`: of its surface. One that is not the class's own takes an object as its first argument."""
        self._bits = bits
        super().__init__(
            function, where, options, code, is_stream=bool(bits & STREAM), is_coroutine=bool(bits & COROUTINE)
        )
        self._of, self._last = of, of._last

    @property
    def _takes_express(self) -> bool:
        """As of others; what may construct an object says that with each call."""
        return not self._bits & OF_CLASS and super()._takes_express

    def options(self, **changes: Any) -> ClassFunction:
        """The same method with other options: timeout_s, idempotent, keep, device. Raises InvalidArgument."""
        options = options_of(replace, self._options, **changes)
        _demand_of_objects(options)
        return ClassFunction(self._of, self._function, self._env, options, self._code, self._bits)

    def implementation(self, where: FunctionEnv | Sequence[str]) -> Callable[[Callable[..., Any]], Isolated[..., Any]]:
        """Raises InvalidArgument: a class has one environment."""
        raise InvalidArgument(f"{self._label}: its class's objects live in one environment; decorate a function")

    def _call_of(self, given: Arguments, args: Any, kwargs: Any, options: Options) -> Call:
        if options.keep or self._is_stream or not self._bits & OF_CLASS:
            return super()._call_of(given, args, kwargs, options)

        def made(_: Any, hold: Hold) -> Any:
            return self._of._proxy(Remote(self._of, hold, self, args, kwargs))

        return Call(self, given, args, kwargs, options, wrap=made, stays=frames.OWN)


class Remote(Stay):
    """An object of an isolated class in a worker, and how it is had again: by the class or a method of it."""

    def __init__(self, owner: IsolatedClass, hold: Hold, maker: Owner, args: Any, kwargs: Any) -> None:
        super().__init__(owner._label, owner._env)
        self.owner = owner
        self._again = (maker, args, kwargs) if owner._on_death == "rebuild" else None
        self._express: dict[str, MethodExpress | None] = {}  # by method; None for those that go another way
        self.take(hold)

    @property
    def maker(self) -> tuple[Owner, Any, Any] | None:
        """What it would be constructed by again, and of which arguments."""
        return self._again

    def _construct(self, maker: Owner, args: Any, kwargs: Any) -> None:
        self.take(self.owner._construct(maker, args, kwargs, self.backend))

    def rebuild(self, lost: Hold) -> bool:
        """Construct it again, unless another thread has. False where that is not wanted. Raises as a call does."""
        with self._lock:
            again = self._again  # another thread's close() sets None
            if again is None or self.is_closed:
                return False
            if self._hold is lost:
                lost.lose()
                self._construct(*again)
        return True

    def begin(self, name: str, args: tuple[Any, ...]) -> Begun | None:
        """A call of a method that is on its lane; None for one that has to go the longer way."""
        with self._lock:
            hold, express = self._hold, self._express.get(name)
            if hold is None or (express is None and name in self._express):
                return None
            if express is None or not express.is_of(hold):
                counts = self.owner._plain_counts_of(name)
                its = None if not counts else MethodExpress(self.owner, counts, name, f"{self.label}.{name}", hold)
                express = self._express[name] = its
                if express is None:
                    return None
            loan = Lent(self, hold)
            hold.note_lent(loan)
        return express.begin(args, Borrowed(self, loan))

    def call(self, how: int, name: str, args: Any = ()) -> Use:
        return Use(self, self.owner, how, name, args, {}, self.owner._options)

    def close(self, timeout_s: float | None) -> None:
        """As Stay.close."""
        self._again = None
        super().close(timeout_s)


def _held(_: Any, hold: Hold, reserved: Reserved | None = None) -> Hold:
    return hold if reserved is None else hold.in_own_worker(reserved)


class Method:
    """A method of a proxy's object: called as ever, or with `submit`."""

    def __init__(self, remote: Remote, name: str, options: Options | None = None) -> None:
        self._remote, self._name = remote, name
        self._options = remote.owner._options if options is None else options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in the environment; a coroutine method is sent, and gives a FunctionFuture. Raises as a call of a
        function does."""
        remote = self._remote
        if not kwargs and self._options is remote.owner._options:
            begun = remote.begin(self._name, args)
            if begun is not None:
                return begun.run()
        if remote.owner._surface.names.get(self._name, 0) & COROUTINE:
            return self.submit(*args, **kwargs)
        return self._start(args, kwargs).finish()

    def submit(self, *args: Any, **kwargs: Any) -> FunctionFuture:
        """Send a call and return at once. Arguments must not change before it is done."""
        remote = self._remote
        if not kwargs and self._options is remote.owner._options and remote.owner._kernel_ns < SHORT_NS:
            begun = remote.begin(self._name, args)
            if begun is not None:
                return FunctionFuture(begun)
        call = self._start(args, kwargs)
        call.send()
        return FunctionFuture(call)

    def options(self, **changes: Any) -> Method:
        """The same method of the same object with other options: timeout_s, idempotent, keep, device. Raises
        InvalidArgument."""
        options = options_of(replace, self._options, **changes)
        _demand_of_objects(options)
        return Method(self._remote, self._name, options)

    def _start(self, args: Any, kwargs: Any) -> Use:
        remote, options = self._remote, self._options
        remote.owner._demand_fit(self._name, args, kwargs)
        is_stream = bool(remote.owner._surface.names.get(self._name, 0) & STREAM)
        given = Arguments(args, kwargs, (remote.backend,), device=options.device)
        wrap = wrap_of(options, f"{remote.label}.{self._name}", is_stream=is_stream, given=given.on_gpu)
        return Use(remote, remote.owner, frames.METHOD, self._name, args, kwargs, options, wrap, given=given)

    def __repr__(self) -> str:
        owner = self._remote.owner
        return f"<lz.isolated method {owner._label}.{self._name} in {owner._env.backend}>"


def _demand_of_objects(options: Options) -> None:
    """Raises InvalidArgument for options that are for functions."""
    if options.shapes is not None:
        raise InvalidArgument("lz.isolated: shapes is for functions; results of methods are copied once")
    if options.fallback is not None:
        raise InvalidArgument("lz.isolated: fallback is for functions; an object has its state there alone")
    if options.placement != "worker":
        raise InvalidArgument("lz.isolated: placement is for functions; an object lives in its environment")
    if options.shadow:
        raise InvalidArgument("lz.isolated: shadow is for functions; a class has one environment")
    if options.lift:
        raise InvalidArgument("lz.isolated: lift is for functions; what an object keeps is in its worker alone")


class Proxy(Inside):
    """What stands for an object of an isolated class. Its public methods, attributes and properties are the object's;
    `close()` releases it."""

    __slots__ = ("__weakref__", "_lz")
    _lz_surface: Surface
    _lz: Remote

    def __init__(self, remote: Remote) -> None:
        object.__setattr__(self, "_lz", remote)

    def _lz_lend(self, backends: Sequence[str]) -> Lent:
        """As Inside."""
        return self._lz.lend_to(backends)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} shows no {name}: names with an underscore stay in its environment")
        if self._lz_surface.is_method(name):
            return Method(self._lz, name)
        return self._lz_attribute(frames.GET, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "close" or self._lz_surface.is_method(name):
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
            if not remote.is_closed and self._lz_surface.is_method("close"):
                Method(remote, "close")()
        finally:
            remote.close(remote.owner._options.timeout_s)

    def __enter__(self) -> Any:
        """What the class's own `__enter__` gives, or this proxy."""
        if "__enter__" not in self._lz_surface.special:
            return self
        found = self._lz.call(frames.METHOD, "__enter__").finish()
        return self if found[0] else found[1]

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        remote = self._lz
        if remote.is_closed:
            return False
        if "__exit__" not in self._lz_surface.special:
            self.close()
            return False
        try:
            args = () if kind is None else (f"{kind.__qualname__}: {error}",)
            return bool(remote.call(frames.METHOD, "__exit__", args).finish())
        finally:
            remote.close(remote.owner._options.timeout_s)

    def __dir__(self) -> list[str]:
        return sorted({"close", *self._lz_surface.names})

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be copied or pickled: its object is in another process")

    def __repr__(self) -> str:
        owner = self._lz.owner
        return f"<lz.isolated object of {owner._label} in {owner._env.backend}>"


def _proxy_class(cls: type | None, surface: Surface, code: Code) -> type[Proxy]:
    """With those operators that the class has: Python looks for them there."""

    def operator(name: str) -> Any:
        def run(self: Proxy, *args: Any, **kwargs: Any) -> Any:
            return Method(self._lz, name)(*args, **kwargs)

        run.__name__ = name
        return run

    held: dict[str, Any] = {"__slots__": (), "__module__": code.module, "__doc__": cls and cls.__doc__}
    held |= {"_lz_surface": surface, **{name: operator(name) for name in OPERATORS & surface.special}}
    if surface.special & {"__iter__", "__getitem__"}:
        held["__iter__"] = lambda self: iterate(self._lz, self._lz.owner, self._lz.owner._options.device)
    return type(code.qualname.rpartition(".")[2], (Proxy,), held)
