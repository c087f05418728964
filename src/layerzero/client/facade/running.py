"""A request run, or handled otherwise in its context; and what a submitted one becomes."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from layerzero.client.connection import observing
from layerzero.client.connection.call import Request, Submitted
from layerzero.client.connection.express import Receipt
from layerzero.client.connection.record import Record
from layerzero.client.connection.report import SelectionReport
from layerzero.client.facade.default_session import session
from layerzero.client.gpu.arrays import is_on_gpu
from layerzero.client.gpu.fastpath import MISS
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.session.lanes import OnLane
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, OutputTooSmall

ResultT = TypeVar("ResultT")

handler: ContextVar[Callable[[Request], Any] | None] = ContextVar("handler", default=None)
"""What happens to requests in this context instead of running them: lz.submit and lz.explain set it."""
tracer: ContextVar[Callable[[Request], Any] | None] = ContextVar("tracer", default=None)
"""Takes what lz.submit would send, and answers it: client/tools/trace.py sets it."""


class Tracing(NamedTuple):
    """Whether a framework is tracing a program just now, and what it is given in place of a call."""

    is_on: Callable[[], bool]
    trace: Callable[[Request], Any]


tracing: Tracing | None = None
"""layerzero.torch sets it when it is imported."""


def perform(request: Request) -> ResultT:  # type: ignore[type-var]  # the caller knows what its op gives
    if tracing is not None and tracing.is_on():
        return tracing.trace(request)  # type: ignore[no-any-return]
    handle = handler.get()
    result: ResultT = handle(request) if handle is not None else session().run(request)
    return result


def perform_sized(make: Callable[..., Request], sizes: tuple[int, ...]) -> Any:
    """Run a call whose output size depends on the data; once more with the size that the kernel asked for."""
    if handler.get() is send:
        raise InvalidArgument("ops with text results cannot be submitted; call them in a thread of their own")
    try:
        return perform(make(*sizes))
    except OutputTooSmall as exc:
        needed = exc.facts.get("needed")
        if not (
            isinstance(needed, list) and len(needed) == len(sizes) and all(type(n) is int and n >= 0 for n in needed)
        ):
            raise
        return perform(make(*(max(n, size) for n, size in zip(needed, sizes, strict=True))))


def send(request: Request) -> Future:
    """A request on its way: the handler of lz.submit."""
    owner = session()
    trace = tracer.get()
    if trace is not None:
        return Future(owner, request.op, value=trace(request))
    if is_on_gpu(request.args):
        value = owner.run(request)
        record = owner.last_record
        return Future(owner, request.op, value=value, record=record)
    begun = None if observing.recorder is None else observing.recorder.begin(request)
    return Future(owner, request.op, owner.send(request), begun=begun)


class Future:
    """A submitted call. `result()` waits; it can be awaited too."""

    def __init__(
        self,
        owner: Session,
        op: str,
        submitted: Submitted | Receipt | OnLane | None = None,
        *,
        value: Any = None,
        record: Record | SelectionReport | Enqueued | None = None,
        begun: Any = None,
    ) -> None:
        """Without `submitted` the call has ended with `value`, or is enqueued on a GPU. `begun`: of a trace."""
        self._session = owner
        self._op = op
        self._submitted = submitted
        self._record: Record | SelectionReport | Enqueued | None = record
        self._value = value
        self._begun = begun
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """True when `result()` would not wait."""
        submitted = self._submitted
        if submitted is None:
            return True
        if isinstance(submitted, Submitted):
            if not submitted.pending.is_done:
                submitted.link.read_nowait()
            return submitted.pending.is_done
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return self._submitted is not submitted or self._take(-math.inf)
        finally:
            self._lock.release()

    def __repr__(self) -> str:
        if self._submitted is not None:
            submitted = self._submitted
            is_here = submitted.pending.is_done if isinstance(submitted, Submitted) else submitted.end() is not None
            state = "answered" if is_here else "running"
        elif isinstance(self._error, LayerZeroError):
            state = f"failed, {self._error.code}"
        else:
            state = "done" if self._error is None else f"failed, {type(self._error).__name__}"
        return f"<lz.Future of {self._op}: {state}>"

    @property
    def record(self) -> Record | SelectionReport | Enqueued | None:
        """As Session.last_record, of this call."""
        return self._record

    @property
    def report(self) -> SelectionReport | None:
        """As lz.last_report(), of this call; None until its result was taken."""
        report = self._session.report_of(self._record)
        if not isinstance(self._record, Enqueued):
            self._record = report
        return report

    def result(self, timeout: float | None = None) -> Any:
        """The op's result. Raises what the op raises, and TimeoutError when it is not there after `timeout` seconds:
        the call goes on then, and may be asked again."""
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise self._too_early(timeout)
        try:
            if self._submitted is not None and not self._take(until_s):
                raise self._too_early(timeout)
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return self._value

    def _take(self, until_s: float) -> bool:
        """Whether the call has ended by then: its value or its error is here."""
        submitted, owner = self._submitted, self._session
        try:
            value = submitted if isinstance(submitted, Submitted) else owner.take(submitted, until_s)
            if isinstance(value, Submitted):
                self._submitted = value  # it may have left its lane
                value = owner.finish(value) if owner.await_answer(value, until_s) else MISS
            if value is MISS:
                return False
            self._value = value
        except Exception as exc:  # the op's error, or an array library's, as each `result` raises it; not an interrupt
            self._error = exc
        self._record = owner.last_record
        if self._begun is not None and observing.recorder is not None:
            observing.recorder.end(self._begun, owner, self._value, self._error)
        self._submitted = self._begun = None
        return True

    def _too_early(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"{self._op} is still running after {timeout:g} s; ask again, or wait longer")

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()
