"""Calls of functions and objects in environments of their own: attempts, futures, reports."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from layerzero.client.capsules.form import WRONG, Failure
from layerzero.client.capsules.of_function import CALL
from layerzero.client.capsules.taking import failures_of, not_kept
from layerzero.client.connection import observing
from layerzero.client.connection.call import Request
from layerzero.client.connection.report import Attempt, SelectionReport
from layerzero.client.facade import default_session
from layerzero.client.facade.running import Future as Sent
from layerzero.client.facade.running import handler
from layerzero.client.gpu.lent import GpuLoan, Lent
from layerzero.client.gpu.lent_calls import homes, lend, steps_down
from layerzero.client.session.lanes import OnLane
from layerzero.client.session.session import Session
from layerzero.functions import breakpoints
from layerzero.functions.agreement import difference
from layerzero.functions.calling import MIN_ROOM, Answer, Arguments, Exchange, Loan, ObjectLost
from layerzero.functions.capsules import Asked, Told, take
from layerzero.functions.devices import why_uncompared, without_gpu
from layerzero.functions.environment import FunctionEnv
from layerzero.functions.futures import FunctionFuture
from layerzero.functions.held import Hold
from layerzero.functions.options import Options
from layerzero.functions.places import Places
from layerzero.functions.ranges import MAX_LENT, Place
from layerzero.functions.report import IN_WORKER, FunctionReport
from layerzero.functions.warned import Warned
from layerzero.ipc.errors import (
    BackendError,
    DeadlineExceeded,
    DigestRequired,
    InvalidArgument,
    LayerZeroError,
    NoBackend,
    NotConnected,
    NoTransport,
    RemoteError,
    text_of,
)
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame, Reference
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.tensors import TensorSpec

_log = logging.getLogger("layerzero.functions")
MAX_REBUILDS = 3  # in one call
UNKNOWN_NS = 1 << 63
SHORT_NS = 10_000_000  # what took no longer there may be sent past the broker, which watches over its time else
UNKNOWN = "unknown_backend"  # a fact of the broker's error


# What ends a call for good, whoever else could run the function: it has run, or it cannot be called like that.
_FINAL = (RemoteError, InvalidArgument, NotConnected)


class Owner(Protocol):
    """What calls belong to: a function, or the class of objects."""

    _env: FunctionEnv
    _places: Places
    _room: int  # bytes for an answer, by the largest one so far
    _kernel_ns: int  # of the last call that ended well
    _last: threading.local
    _options: Options

    @property
    def _label(self) -> str: ...


Wrap: TypeAlias = Callable[[Owner, Hold], Any]
"""What stands here for a result that stays in the worker."""


class Call:
    """One call on its way: attempts, then the fallback. `wrap`: of what stays there it makes what the caller gets;
    `stays`: that is all of the result, or objects of the class."""

    def __init__(
        self,
        owner: Owner,
        given: Arguments | None,
        args: Any,
        kwargs: Any,
        options: Options,
        label: str = "",
        wrap: Wrap | None = None,
        stays: int = frames.ALL,
        session: Session | None = None,
    ) -> None:
        """`session`: of one that was sent already."""
        self.label = label or owner._label
        self.owner, self.args, self.kwargs, self.options = owner, args, kwargs, options
        self.given = given  # until it has ended; None where this process makes the call
        self.placed = IN_WORKER
        self._start_ns, self._ended_ns = time.perf_counter_ns(), 0
        self._served_by, self._uncopied_bytes = "", 0
        self._record: Any = None
        self._session: Session = session or default_session.session()
        breakpoints.listen(self._session)
        # Of lz.plan, lz.dry_run, lz.compile: a result would be taken for a constant.
        if session is None and handler.get() is not None:
            text = f"{self.label} runs in another environment, which plans cannot record; call it outside of the plan"
            raise InvalidArgument(text)
        self._failures: list[str] = []
        self._fell: tuple[str, ...] = ()  # what a fallback that failed has raised
        self._attempts = 0
        self._wrap, self._stays = wrap, frames.NOTHING if wrap is None else stays
        self._loan: Loan | None = None  # of the object that is called
        self._rebuilds = self._placed_bytes = 0
        self._has_repeated = self._is_taught = self._has_digest = False
        self._shadow = self._capsule = self._device = ""
        self._library = ""  # of arrays of the result; each its own when empty
        self._sent: Sent | None = None
        self._exchange: Exchange | None = None
        self._warned: list[tuple[Warned, str]] = []

    def send(self) -> None:
        """For a future; what fails at once fails in `finish`."""
        request, session = self._request(), self._session
        is_short = self.owner._kernel_ns < SHORT_NS
        self._sent = Sent(session, FUNCTION, session.send(request) if is_short else session.submit(request))

    @property
    def is_sent(self) -> bool:
        """Whether it is under way."""
        return self._sent is not None and not self._sent.done()

    def finish(self, timeout: float | None = None) -> Any:
        """The function's result. Raises TimeoutError where it is not there after `timeout` seconds, and a warning of
        the function's where this program has such warnings be errors."""
        try:
            return self._finish(timeout)
        finally:
            while self._warned:
                warned, label = self._warned.pop(0)
                warned.issue(label)

    def _finish(self, timeout: float | None) -> Any:
        while True:
            try:
                sent = self._sent
                answer = self._answer(timeout)
                error = answer.error
            except TimeoutError:
                raise
            except LayerZeroError as exc:
                if self._has_taught(exc) or self._goes_another_way(exc):
                    continue
                if exc.facts.get("is_earlier"):  # of another call on the GPU: nothing of this one has begun
                    self._note("")
                    raise
                self._record = getattr(exc, "report", None)
                self._keep(self._session.report_of(self._record), exc)
                error = self._understood(exc)
            if error is None:
                wrap, served_by = self._wrap, answer.served_by
                record = self._record = self._session.last_record if sent is None else sent.record
                if type(record) is tuple and (record[5] or record[7]):  # of attempts before
                    self._keep(self._session.report_of(record))
                if self.options.shadow and wrap is None:
                    self._check(answer.value, served_by)
                self._note(served_by, answer.value)
                return answer.value if wrap is None else self._wrapped(wrap, answer.value, served_by)
            where = self._env_of(error)
            self._failures.append(f"{where.name}: {error.code}: {error.message.partition(chr(10))[0]}")
            if not self._may_repeat(error):
                return self._fall_back(error)

    def _wrapped(self, wrap: Wrap, value: Any, served_by: str) -> Any:
        if not isinstance(value, Reference):  # another result of a method of a class
            return value
        where = self.owner._places.env_of(served_by)
        return wrap(self.owner, Hold(self._session, served_by, where.name, value))

    def _answer(self, timeout: float | None) -> Answer:
        sent = self._sent
        if sent is not None:
            found = sent.result(timeout)
            self._sent = None
        else:
            request = self._request()
            assert self._exchange is not None
            found = self._exchange.run(request)
        assert isinstance(found, Answer)
        exchange, owner = self._exchange, self.owner
        if exchange is not None:
            self._placed_bytes = exchange.placed_bytes
            self._warned += exchange.warned
            loan = None if self.given is None else self.given.loan
            if loan is not None:
                self._placed_bytes += loan.uncopied_bytes
                owner._places.results_there[self.label] = exchange.there or ()
            if exchange.answer_bytes > owner._room:
                owner._room = frames.PLACED_AT + exchange.answer_bytes + exchange.answer_bytes // 8
        return found

    def request_at(self, place: Place, block: memoryview, lent: Lent | None = None) -> Request:
        """Of a call whose frame is in this block, at that place of an arena, put on a lane. `lent`: on a GPU."""
        assert self.given is not None
        exchange = self._new_exchange(self.given)
        self.given.loan = exchange.loan = lent
        held = [block, self.given.keep]
        return exchange.request_at(place, held, self.given.lent, MIN_ROOM, self._timeout_s(), [])

    def go_on(self, sent: OnLane | Sent, start_ns: int) -> None:
        """It was put on a lane, or on a ring, then."""
        self._sent = sent if isinstance(sent, Sent) else Sent(self._session, FUNCTION, sent)
        self._start_ns = start_ns

    def _new_exchange(self, given: Arguments) -> Exchange:
        """Of one more attempt."""
        self._attempts += 1
        places = self.owner._places
        places.introduce(self._session)
        name = places.env_of(given.backends[0]).name
        its = (self._session, given.backends, self.label, name, self._stays, places.of(given.nbytes))
        self._exchange = exchange = Exchange(*its)
        exchange.library, exchange.arrays = self._library, given.lent_arrays
        return exchange

    def _request(self) -> Request:
        given = self.given
        assert given is not None
        if given.on_gpu is not None and len(given.backends) > 1:
            given.backends = homes(given.on_gpu, given.backends)
        exchange = self._new_exchange(given)
        loan = given.loan = self._lent_there(given)
        if self._stays != frames.NOTHING:
            given.note_kept("what stays there may refer to it")
        try:
            frame = self._frame(given)
        except BaseException:
            if loan is not None:
                loan.close()
            raise
        return exchange.request(
            frame,
            given.lent,
            room=self._room(),
            timeout_s=self._timeout_s(),
            copies=[*given.copies, *(() if loan is None else loan.copies)],
            keep=(given.keep, self._loan),
            loan=loan,
        )

    def _lent_there(self, given: Arguments) -> GpuLoan | None:
        """What this attempt lends on a GPU, with memory for results that are as the last ones were."""
        if given.on_gpu is None:
            return None
        results = self._results_there() if self._stays == frames.NOTHING else ()
        return lend(self._session.gpus, given.on_gpu, range(len(given.ranges), MAX_LENT), results)

    def _results_there(self) -> Sequence[TensorSpec]:
        return self.owner._places.results_there.get(self.label, ())

    def _backends(self, given: Arguments) -> Sequence[str]:  # that may serve it after a death
        return given.backends

    def _timeout_s(self) -> float | None:
        return self.options.timeout_s

    def _room(self) -> int:
        """Bytes for the answer."""
        return self.owner._room

    def _frame(self, given: Arguments) -> Frame:
        return given.frame(frames.CALL, self.owner._places.tree(given.backends), stays=self._stays)

    def _has_taught(self, error: LayerZeroError) -> bool:
        """Whether the broker did not know the environment, and does now, by this call or another: nothing has begun."""
        is_unknown = isinstance(error, NoBackend) or (isinstance(error, InvalidArgument) and UNKNOWN in error.facts)
        if self._is_taught or not is_unknown:
            return False
        self._is_taught = self.owner._places.are_served(self._session.ask)
        self._sent = None
        return self._is_taught

    def _goes_another_way(self, error: LayerZeroError) -> bool:
        """Whether memory on a GPU may reach the worker in another way, or the broker wants to know what is in it:
        nothing has begun."""
        loan = None if self.given is None else self.given.loan
        if loan is None or not isinstance(error, (NoTransport, DigestRequired)):
            return False
        if isinstance(error, DigestRequired):
            may_go, self._has_digest = not self._has_digest, True
        else:
            transport = str(error.facts.get("transport", ""))
            may_go = transport == loan.transport and steps_down(self._session, loan, error)
        self._sent = None if may_go else self._sent
        return may_go

    def _understood(self, error: LayerZeroError) -> LayerZeroError:
        """The error with the function's name, and what to do about it."""
        if isinstance(error, NoTransport):
            its = without_gpu(self.label, None if self.given is None else self.given.on_gpu)
            said = f"{its}, or have its worker see the GPU: {error.message}"
            error.message, error.args = said, (said,)
        if isinstance(error, (InvalidArgument, NoBackend)):
            return self.owner._places.explain_failure(error, self._session.ask)
        if isinstance(error, BackendError):
            said = f"{self.label} in {self._env_of(error).name}: {error.message}"
            if isinstance(error, DeadlineExceeded):
                is_at_one = breakpoints.was_at_one(str(error.facts.get("backend", "")), self._start_ns)
                said += "; it was at a breakpoint: give it longer, with timeout_s=" if is_at_one else ""
            else:
                said += "; it may have run in part" + (
                    "" if self.options.idempotent else ": idempotent=True lets such a call run once more"
                )
            error.message, error.args = said, (said,)
        return error

    def _env_of(self, error: LayerZeroError) -> FunctionEnv:
        """The environment that an error is of; the one that is wanted first where it is of none."""
        return self.owner._places.env_of(str(error.facts.get("backend", "")))

    def _may_repeat(self, error: LayerZeroError) -> bool:
        """Once more, on a new worker: after a death that is not its own deadline's."""
        if isinstance(error, ObjectLost):
            return self._rebuild(error)
        is_death = isinstance(error, BackendError) and not isinstance(error, DeadlineExceeded)
        if not (is_death and self.options.idempotent and not self._has_repeated):
            return False
        self._sent, self._has_repeated = None, True
        return True

    def _rebuild(self, error: ObjectLost) -> bool:
        """Whether an object that was found lost was constructed again: nothing of the call has begun."""
        given = self.given
        if given is None or self._rebuilds == MAX_REBUILDS:
            return False
        loans = given.loans if self._loan is None else [self._loan, *given.loans]
        lost = next((loan for loan in loans if loan.reference.place == error.reference.place), None)
        try:
            if lost is None or not lost.rebuild():
                return False
            self._rebuilds += 1
            if given.loans:
                its = self._backends(given), given.library, self.options.device
                self.given = Arguments(self.args, self.kwargs, *its)
        except LayerZeroError:
            self._note("")
            raise
        return True

    def _fall_back(self, error: LayerZeroError) -> Any:
        fallback = self.options.fallback
        self._sent = None
        if fallback is None or isinstance(error, _FINAL):
            self._note("")
            raise error
        self._attempts += 1
        name = getattr(fallback, "__qualname__", repr(fallback))
        try:
            value = self._after(error, fallback)
        except BaseException as exc:  # the program's own Ctrl-C, too: what went before it is to be seen
            kind = exc.code if isinstance(exc, LayerZeroError) else type(exc).__qualname__
            self._fell = (f"fallback {name}: {kind}: {text_of(exc).partition(chr(10))[0]}",)
            self._note("")
            raise
        self._note(f"fallback {name}", value)
        return value

    def _after(self, error: LayerZeroError, fallback: Callable[..., Any]) -> Any:
        """What the fallback returns. What it raises has the error as its context."""
        try:
            raise error
        except LayerZeroError:
            return self._value_of(fallback)

    def _value_of(self, fallback: Callable[..., Any]) -> Any:
        value = fallback(*self.args, **self.kwargs)
        return value.result() if isinstance(value, FunctionFuture) else value  # of an isolated coroutine function

    # --- capsules

    def _asked(self) -> tuple[Sequence[Asked], str] | None:
        """What was sent, and why it cannot be made again; None where there is nothing that could be kept."""
        assert self.given is not None
        return [Asked(CALL, "", self._stays, self.given)], ""

    def _told(self) -> Told | None:
        """What a capsule is made of, where they are on. Raises nothing: what fails is the note."""
        if not self._session.capsules.is_on:
            return None
        try:
            candidates = self.owner._places.candidates
            asked = None if self.given is None or candidates[0].code.is_model else self._asked()
            return None if asked is None else Told(self.label, candidates, *asked, self.options.tolerance)
        except Exception as exc:  # the call has its result or its error all the same
            self._capsule = not_kept(exc)
            return None

    def _keep(self, report: SelectionReport | None, error: LayerZeroError | None = None) -> None:
        """A capsule of an attempt whose worker died or hung; the error's report names it, too."""
        failures = [] if report is None else failures_of(report.attempts)
        if report is None or not failures:
            return
        told = self._told()
        if told is not None:
            self._capsule = take(self._session.capsules, told, failures, report.backend or "", report)
        if error is not None and self._capsule:
            self._record = replace(report, notes=(*report.notes, self._capsule))
            error.report = self._record  # type: ignore[attr-defined]

    def _check(self, value: Any, served_by: str) -> None:
        """Now and then the next environment computes it, too, before the caller may change the arguments."""
        places = self.owner._places
        others = [one.env for one in places.candidates if one.env is not places.env_of(served_by)]
        if not others or random.random() >= self.options.shadow:
            return
        if self.given is not None and self.given.on_gpu is not None:
            self._shadow = f"not made: {why_uncompared(self.given.on_gpu)}"
            return
        if self.given is not None and self.given.loans:
            self._shadow = f"not made: objects among the arguments are in {places.env_of(served_by).name} alone"
            return
        options = replace(self.options, shadow=0.0, fallback=None, idempotent=False)
        try:
            given = Arguments(self.args, self.kwargs, places.backends_of(others[0]))
            its = self._again(given, options).finish()
            found = difference(value, its, self.options.tolerance)
            self._shadow = f"differs from {others[0].name}: {found}" if found else f"agrees with {others[0].name}"
            told = self._told() if found else None
            if told is not None:
                wrong = Failure(served_by, served_by, WRONG, f"{found}, of {others[0].backend}", None, None)
                self._capsule = take(self._session.capsules, told, [wrong], others[0].backend)
        except LayerZeroError as exc:
            found = exc.message.partition("\n")[0]
            self._shadow = f"{others[0].name} failed: {found}"
        if found:
            _log.warning("%s: shadow check: %s", self.label, self._shadow)

    def _again(self, given: Arguments, options: Options) -> Call:
        """The same call elsewhere."""
        return Call(self.owner, given, self.args, self.kwargs, options)

    def _note(self, served_by: str, value: Any = None) -> None:
        """It has ended: what a report is made of, without the arguments. `value`: for a trace."""
        given, args, kwargs = self.given, self.args, self.kwargs
        self._ended_ns, self._served_by = time.perf_counter_ns(), served_by
        if type(self._record) is tuple:
            self.owner._kernel_ns = self._record[4]
        self._uncopied_bytes = self._placed_bytes + (0 if given is None else given.uncopied_bytes)
        self._device = "" if given is None else given.device
        self.given, self.args, self.kwargs, self._exchange, self._loan, self._wrap = None, (), {}, None, None, None
        self.owner._last.call = self
        if observing.recorder is not None:
            observing.recorder.note_function(self, (self._start_ns, self._ended_ns), args, kwargs, value)

    @property
    def report(self) -> FunctionReport | None:
        """None until it has ended."""
        if not self._ended_ns:
            return None
        owner = self.owner
        selection = self._session.report_of(self._record)
        return FunctionReport(
            self.label,
            owner._places.env_of(self._served_by).name,
            self._served_by,
            self._attempts,
            (*self._failed(() if selection is None else selection.attempts), *self._fell),
            () if selection is None else selection.copies,
            self._uncopied_bytes,
            (self._ended_ns - self._start_ns) / 1e3,
            selection,
            self._rebuilds > 0,
            self._shadow,
            "in_process" if self.placed.is_here else "worker",
            self.placed.reason,
            self._capsule,
            device=self._device,
        )

    def _failed(self, attempts: Sequence[Attempt]) -> list[str]:
        """What went wrong, in order. `attempts`: of the last request, whose own error tells of the last of them."""
        found = [f"{one.backend}: {one.outcome}: {one.detail}" for one in attempts if one.outcome is not None]
        if not self._failures or not attempts or attempts[-1].outcome is None:
            return [*self._failures, *found]
        *earlier, last = self._failures
        end = attempts[-1]
        is_told = last.startswith(f"{self.owner._places.env_of(end.backend).name}: {end.outcome}: ")
        return [*earlier, *(found[:-1] if is_told else found), last]
