"""Functions of a module that run in an environment of their own: their calls, futures and reports."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from layerzero.client.connection.report import Copy, SelectionReport
from layerzero.client.facade import default_session
from layerzero.client.facade.running import Future as Sent
from layerzero.client.facade.running import handler
from layerzero.client.session.session import Session
from layerzero.functions.calling import MIN_ROOM, Answer, Arguments, Exchange
from layerzero.functions.environment import FunctionEnv
from layerzero.ipc.errors import (
    BackendError,
    DeadlineExceeded,
    InvalidArgument,
    LayerZeroError,
    NoBackend,
    NotConnected,
    RemoteError,
)
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code, Frame
from layerzero.ipc.vocabulary.ops import FUNCTION

P = ParamSpec("P")
R = TypeVar("R")
MAX_OPEN = 32  # of a map

# What ends a call for good, whoever else could run the function: it has run, or it cannot be called like that.
_FINAL = (RemoteError, InvalidArgument, NotConnected)


@dataclass(frozen=True)
class Options:
    timeout_s: float | None = None
    fallback: Callable[..., Any] | None = None
    idempotent: bool = False


@dataclass(frozen=True)
class FunctionReport:
    """How a call of an isolated function went. `served_by`: the environment's backend, or the fallback's name; empty
    where the call failed. `failures`: what went wrong before, as "where: code: message". `copies`: bytes that were
    copied, where and why; `uncopied_bytes`: of arrays that crossed as they lay. `selection`: the broker's report of
    the last attempt there; None where it has none. `is_rebuilt`: the call's object was lost and constructed again."""

    function: str
    env: str
    served_by: str
    attempts: int
    failures: tuple[str, ...]
    copies: tuple[Copy, ...]
    uncopied_bytes: int
    elapsed_us: float
    selection: SelectionReport | None = None
    is_rebuilt: bool = False

    def __str__(self) -> str:
        copied = sum(copy.nbytes for copy in self.copies)
        lines = [
            f"{self.function} in {self.env}: {f'served by {self.served_by}' if self.served_by else 'failed'}, "
            f"{self.elapsed_us:,.0f} us, {self.uncopied_bytes:,} bytes of arrays uncopied, {copied:,} copied"
        ]
        lines += [f"  copied: {copy.arg}, {copy.nbytes:,} bytes ({copy.where}): {copy.reason}" for copy in self.copies]
        lines += [f"  failed: {text}" for text in self.failures]
        lines += ["  its object was constructed again"] if self.is_rebuilt else []
        return "\n".join(lines)


@dataclass(frozen=True)
class FunctionExplanation:
    """Where a call would run, and what would be copied. `state`: of the environment's worker, or why there is none.
    `command`: what to run first; empty for nothing."""

    function: str
    env: str
    backend: str
    file: str
    sha256: str
    state: str
    command: str
    copies: tuple[Copy, ...]
    uncopied_bytes: int

    def __str__(self) -> str:
        lines = [f"{self.function} of {self.file} ({self.sha256[:12]}) in {self.backend}: {self.state}"]
        lines += [f"  run: {self.command}"] if self.command else []
        lines += [f"  copied: {copy.arg}, {copy.nbytes:,} bytes: {copy.reason}" for copy in self.copies]
        return "\n".join(lines)


class Owner(Protocol):
    """What calls belong to: a function, or the class of objects."""

    _env: FunctionEnv
    _tree: list[Any]  # of frames.Code
    _room: int  # bytes for an answer, by the largest one so far
    _last: threading.local

    @property
    def _label(self) -> str: ...


class Isolated(Generic[P, R]):
    """A function that runs in an environment: called as ever. Threads may share it."""

    def __init__(self, function: Callable[P, R], where: FunctionEnv, options: Options, code: Code) -> None:
        self._code = code  # as the file was when the function was decorated
        self._function, self._env, self._options = function, where, options
        self._tree = self._code.to_tree()
        self._signature = inspect.signature(function)
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        is_plain = all(
            kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
        )
        self._count = len(kinds) if is_plain else -1  # so many arguments fit without a look
        self._room = MIN_ROOM
        self._last = threading.local()
        functools.update_wrapper(self, function)

    @property
    def env(self) -> FunctionEnv:
        return self._env

    def __repr__(self) -> str:
        return f"<lz.isolated {self._label} in {self._env.backend}>"

    @property
    def _label(self) -> str:
        return f"{self._code.module}.{self._code.qualname}"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it in its environment. Arguments are lent: they must not change before it returns.

        Raises RemoteError for what it raised there, InvalidArgument for arguments and results that cannot cross,
        EnvError where its environment cannot serve, DeadlineExceeded, BackendError where its worker died, and what a
        call of any op raises besides.
        """
        return self._start(args, kwargs).finish()  # type: ignore[no-any-return]

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> FunctionFuture:
        """Send a call and return at once. Arguments must not change before it is done."""
        call = self._start(args, kwargs)
        call.send()
        return FunctionFuture(call)

    def map(self, *iterables: Any) -> Iterator[R]:
        """Results of calls with items of these, in order; some calls are on their way ahead. The first that fails
        raises; those that were sent behind it run."""
        ahead: deque[FunctionFuture] = deque()
        calls = zip(*iterables)  # noqa: B905  # as map() of Python does
        submit: Callable[..., FunctionFuture] = self.submit
        for args in itertools.islice(calls, MAX_OPEN):
            ahead.append(submit(*args))
        while ahead:
            yield ahead.popleft().result()
            for args in itertools.islice(calls, 1):
                ahead.append(submit(*args))

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it here, in this process, with what is installed here."""
        return self._function(*args, **kwargs)

    def options(self, **changes: Any) -> Isolated[P, R]:
        """The same function with other options: timeout_s, fallback, idempotent. Raises InvalidArgument."""
        return Isolated(self._function, self._env, options_of(replace, self._options, **changes), self._code)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> FunctionExplanation:
        """Where such a call would run, and what it would copy. Runs nothing. Raises InvalidArgument for arguments that
        cannot go there."""
        self._bind(args, kwargs)
        given = Arguments(args, kwargs)
        state, command = "", ""
        try:
            told = default_session.session().ask("health", backend=self._env.backend)
            state = str(told["detail"])
        except LayerZeroError as exc:
            state = exc.message.partition("\n")[0]
        if not self._env.is_built:
            state, command = "its environment is not built", self._env.build_command
        where, code = self._env, self._code
        copies = tuple(given.copies)
        return FunctionExplanation(
            self._label, where.name, where.backend, code.file, code.sha256, state, command, copies, given.uncopied_bytes
        )

    def warmup(self) -> float:
        """Start its worker and import its module there. Returns seconds. Raises as a call does."""
        start_s = time.monotonic()
        call = Call(self, None, (), {}, self._options)
        call.finish()
        return time.monotonic() - start_s

    def last_report(self) -> FunctionReport:
        """Of this thread's last call of this function. Raises InvalidArgument before the first one."""
        call: Call | None = getattr(self._last, "call", None)
        if call is None:
            raise InvalidArgument(f"{self._label}: call it first; this thread has not yet")
        assert call.report is not None
        return call.report

    def _bind(self, args: Any, kwargs: Any) -> None:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise InvalidArgument(f"{self._label}: {exc}") from None

    def _start(self, args: Any, kwargs: Any) -> Call:
        if kwargs or len(args) != self._count:
            self._bind(args, kwargs)
        return Call(self, Arguments(args, kwargs), args, kwargs, self._options)


class Call:
    """One call on its way: attempts, then the fallback. `given`: None to load the module alone."""

    def __init__(
        self,
        owner: Owner,
        given: Arguments | None,
        args: Any,
        kwargs: Any,
        options: Options,
        label: str = "",
    ) -> None:
        self.label = label or owner._label
        self.owner, self.given, self.args, self.kwargs, self.options = owner, given, args, kwargs, options
        self._start_ns, self._ended_ns = time.perf_counter_ns(), 0
        self._served_by, self._uncopied_bytes = "", 0
        self._record: Any = None
        self._session: Session = default_session.session()
        if handler.get() is not None:  # of lz.plan, lz.dry_run, lz.compile: a result would be taken for a constant
            text = f"{self.label} runs in another environment, which plans cannot record; call it outside of the plan"
            raise InvalidArgument(text)
        self._failures: list[str] = []
        self._attempts = 0
        self._has_repeated = self._is_rebuilt = False
        self._sent: Sent | None = None
        self._exchange: Exchange | None = None

    def send(self) -> None:
        """For a future; what fails at once fails in `finish`."""
        request = self._request()
        self._sent = Sent(self._session, FUNCTION, self._session.submit(request))

    @property
    def sent(self) -> Sent | None:
        return self._sent

    def finish(self, timeout: float | None = None) -> Any:
        """The function's result. Raises TimeoutError where it is not there after `timeout` seconds."""
        owner = self.owner
        while True:
            try:
                answer = self._answer(timeout)
                error = answer.error
            except TimeoutError:
                raise
            except LayerZeroError as exc:
                error = self._understood(exc)
            if error is None:
                self._note(owner._env.backend)
                return answer.value
            self._failures.append(f"{owner._env.name}: {error.code}: {error.message.partition(chr(10))[0]}")
            if not self._may_repeat(error):
                return self._fall_back(error)

    def _answer(self, timeout: float | None) -> Answer:
        sent = self._sent
        if sent is not None:
            found = sent.result(timeout)
            self._sent = None
        else:
            found = self._session.run(self._request())
        assert isinstance(found, Answer)
        exchange, owner = self._exchange, self.owner
        if exchange is not None and exchange.answer_bytes > owner._room:
            owner._room = exchange.answer_bytes + exchange.answer_bytes // 8
        return found

    def _request(self) -> Any:
        owner, given = self.owner, self.given
        self._attempts += 1
        where = owner._env
        self._exchange = exchange = Exchange(self._session, where.backend, self.label, where.name)
        if given is None:
            return exchange.request(Frame([frames.LOAD, owner._tree]), timeout_s=self.options.timeout_s)
        return exchange.request(
            self._frame(given),
            given.lent,
            room=owner._room,
            timeout_s=self.options.timeout_s,
            copies=list(given.copies),
            keep=given.keep,
        )

    def _frame(self, given: Arguments) -> Frame:
        return given.frame(frames.CALL, self.owner._tree)

    def _understood(self, error: LayerZeroError) -> LayerZeroError:
        """The error with the function's name, and what to do about it."""
        where = self.owner._env
        if isinstance(error, (InvalidArgument, NoBackend)):
            return where.explain_failure(error, self._session.ask)
        if isinstance(error, BackendError):
            said = f"{self.label} in {where.name}: {error.message}"
            if not isinstance(error, DeadlineExceeded):
                said += "; it may have run in part" + (
                    "" if self.options.idempotent else ": idempotent=True lets such a call run once more"
                )
            error.message, error.args = said, (said,)
        return error

    def _may_repeat(self, error: LayerZeroError) -> bool:
        """Once more, on a new worker: after a death that is not its own deadline's."""
        is_death = isinstance(error, BackendError) and not isinstance(error, DeadlineExceeded)
        if not (is_death and self.options.idempotent and not self._has_repeated):
            return False
        self._sent, self._has_repeated = None, True
        return True

    def _fall_back(self, error: LayerZeroError) -> Any:
        fallback = self.options.fallback
        self._sent = None
        if fallback is None or self.given is None or isinstance(error, _FINAL):
            self._note("")
            raise error
        self._attempts += 1
        name = getattr(fallback, "__qualname__", repr(fallback))
        value = fallback(*self.args, **self.kwargs)
        self._note(f"fallback {name}")
        return value

    def _note(self, served_by: str) -> None:
        """It has ended: what a report is made of, without the arguments."""
        given = self.given
        self._ended_ns, self._served_by = time.perf_counter_ns(), served_by
        self._uncopied_bytes = 0 if given is None else given.uncopied_bytes
        if served_by == self.owner._env.backend:
            self._record = self._session.last_record
        self.given, self.args, self.kwargs, self._exchange = None, (), {}, None
        self.owner._last.call = self

    @property
    def report(self) -> FunctionReport | None:
        """None until it has ended."""
        if not self._ended_ns:
            return None
        owner = self.owner
        selection = self._session.report_of(self._record)
        return FunctionReport(
            self.label,
            owner._env.name,
            self._served_by,
            self._attempts,
            tuple(self._failures),
            () if selection is None else selection.copies,
            self._uncopied_bytes,
            (self._ended_ns - self._start_ns) / 1e3,
            selection,
            self._is_rebuilt,
        )


class FunctionFuture:
    """A submitted call of a function: `result()` waits; it can be awaited too."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """True when `result()` would not wait for the environment. A retry or a fallback runs in `result()`."""
        sent = self._call.sent
        return self._is_done or sent is None or sent.done()

    def result(self, timeout: float | None = None) -> Any:
        """The function's result. Raises as a call does, and TimeoutError when it is not there after `timeout` seconds:
        the call goes on then."""
        with self._lock:
            if not self._is_done:
                try:
                    self._value = self._call.finish(timeout)
                except TimeoutError:
                    raise
                except Exception as exc:
                    self._error = exc
                self._is_done = True
        if self._error is not None:
            raise self._error
        return self._value

    @property
    def report(self) -> FunctionReport | None:
        """As Isolated.last_report, of this call; None until its result was taken."""
        return self._call.report

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "answered" if not self._is_done else "done"
        return f"<lz.FunctionFuture of {self._call.label}: {state}>"


def options_of(make: Callable[..., Options], *args: Any, **given: Any) -> Options:
    unknown = given.keys() - Options.__dataclass_fields__.keys()
    if unknown:
        known = ", ".join(Options.__dataclass_fields__)
        raise InvalidArgument(f"lz.isolated has no option {min(unknown)}; allowed: {known}")
    made = make(*args, **given)
    if made.fallback is not None and not callable(made.fallback):
        raise InvalidArgument(f"lz.isolated: fallback is {made.fallback!r:.80}; allowed: a function")
    return made
