"""What is recorded of a call becomes a span below the caller's own, with its attempts as children. Calls note which
span they belong to; spans are made of that by a thread, later."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, Tracer

import layerzero as lz
from layerzero.client.connection.report import Attempt
from layerzero.client.traces.calls import RecordedCall
from layerzero.client.traces.recorder import Buffer, recorder
from layerzero.client.traces.snapshot import Snapshot
from layerzero.otel.signals import Durations, Logs

if TYPE_CHECKING:
    from opentelemetry._logs import Logger  # type: ignore[attr-defined,unused-ignore]
    from opentelemetry.metrics import Meter  # type: ignore[attr-defined,unused-ignore]

EVERY_S = 0.5
MOST = 10_000  # calls that wait for their spans; of more the oldest are dropped, and counted


class Sampled(Buffer):
    """Keeps calls whose caller's span is sampled, and of those without one a share; with `takes_all` the others, too,
    which have no context."""

    def __init__(self, share: float, takes_all: bool) -> None:
        super().__init__(MOST, None)
        self.calls = self._chosen = _Chosen(share, takes_all)

    def take(self) -> tuple[list[tuple[SpanContext | None, Any]], int]:
        """All that there is, and how many were dropped before."""
        return self._chosen.take()


class _Chosen(deque[tuple[int, Any]]):
    """What the recorder appends to, in the caller's thread and context, when a call has ended."""

    def __init__(self, share: float, takes_all: bool) -> None:
        super().__init__()
        self._share, self._takes_all = share, takes_all
        self._waiting: deque[tuple[SpanContext | None, Any]] = deque(maxlen=MOST)
        self._noted = itertools.count(1)
        self._last = self._taken = 0

    def append(self, entry: tuple[int, Any]) -> None:
        context = trace.get_current_span().get_span_context()
        if context.trace_flags.sampled if context.is_valid else self._share and random.random() < self._share:
            self._last = next(self._noted)
            self._waiting.append((context, entry))
        elif self._takes_all:
            self._last = next(self._noted)
            self._waiting.append((None, entry))

    def take(self) -> tuple[list[tuple[SpanContext | None, Any]], int]:
        found = []
        while self._waiting:
            found.append(self._waiting.popleft())
        self._taken += len(found)
        dropped = max(self._last - self._taken - len(self._waiting), 0)
        self._taken += dropped
        return found, dropped


class Spans:
    """Made by `start`. `dropped`: so many calls came faster than spans could be made of them."""

    def __init__(self, tracer: Tracer, share: float, durations: Durations | None, logs: Logs | None) -> None:
        self.dropped = 0
        self._tracer = tracer
        self._durations, self._logs = durations, logs
        self._buffer = Sampled(share, durations is not None)
        self._over = threading.Event()
        self._making = threading.Lock()
        self._clock_ns = time.time_ns() - time.perf_counter_ns()
        recorder.add(self._buffer)
        self._thread = threading.Thread(target=self._run, name="layerzero.otel", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Make spans of the calls that have ended until now."""
        with self._making:
            waiting, dropped = self._buffer.take()
            self.dropped += dropped
            for context, call in _calls(waiting):
                span = None if context is None else self._make(context, call)
                if self._durations is not None:
                    self._durations.note(call, None if span is None else trace.set_span_in_context(span, Context()))
                if self._logs is not None and span is not None:
                    self._logs.note(call, span, call.end_ns + self._clock_ns)

    def stop(self) -> None:
        """Make the last spans, and note no more calls. More than once does no harm."""
        recorder.remove(self._buffer)
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.flush()

    def __enter__(self) -> Spans:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self.flush()

    def _make(self, parent: SpanContext, call: RecordedCall) -> Span:
        begin, end = call.start_ns + self._clock_ns, call.end_ns + self._clock_ns
        above = trace.set_span_in_context(NonRecordingSpan(parent)) if parent.is_valid else Context()
        span = self._tracer.start_span(
            f"layerzero {call.name}", above, SpanKind.INTERNAL, dict(_attributes(call)), start_time=begin
        )
        below = trace.set_span_in_context(span)
        for attempt, first, last in _attempts(call, begin, end):
            self._attempt(attempt, below, first, last)
        if call.kernel_ns and not call.error:
            last = end - max(end - begin - call.kernel_ns, 0) // 2
            its = {
                "layerzero.kernel": call.kernel_id,
                "layerzero.backend": call.backend,
                "process.pid": call.worker_pid,
            }
            kernel = self._tracer.start_span(call.kernel_id, below, attributes=its, start_time=last - call.kernel_ns)
            kernel.end(last)
        if call.error:
            _fail(span, call.error.partition(":")[0], call.error)
        span.end(end)
        return span

    def _attempt(self, attempt: Attempt, below: Context, first: int, last: int) -> None:
        its = {
            "layerzero.kernel": attempt.kernel_id,
            "layerzero.backend": attempt.backend,
            "process.pid": attempt.worker_pid,
            **({} if attempt.exit_signal is None else {"layerzero.exit_signal": attempt.exit_signal}),
        }
        span = self._tracer.start_span(attempt.kernel_id, below, attributes=its, start_time=first)
        _fail(span, attempt.outcome or "OTHER", attempt.detail)
        span.end(last)


def _calls(waiting: Iterable[tuple[SpanContext | None, Any]]) -> Iterator[tuple[SpanContext | None, RecordedCall]]:
    """Each with the context that it was made in. A plan's calls that crossed as one have one, and are told apart by
    their place."""
    for context, entry in waiting:
        buffer = Buffer(1, None)
        buffer.calls.append(entry)
        for call in Snapshot(buffer).calls:
            yield context, call


def _attributes(call: RecordedCall) -> Iterator[tuple[str, str | int | float]]:
    yield "layerzero.op", call.name
    for name in ("backend", "path", "device"):
        if value := getattr(call, name):
            yield f"layerzero.{name}", value
    if call.kernel_id:
        yield "layerzero.kernel", call.kernel_id
    if call.inputs:
        yield "layerzero.inputs", ", ".join(map(str, call.inputs))
    if call.scopes:
        yield "layerzero.scope", "/".join(call.scopes)
    if call.copied_bytes:
        yield "layerzero.copied_bytes", call.copied_bytes
    if call.attempts:
        yield "layerzero.failed_attempts", len(call.attempts)


def _attempts(call: RecordedCall, begin: int, end: int) -> Iterator[tuple[Attempt, int, int]]:
    """With when each began and ended: how long it took is not told, so they share the time before the kernel that
    answered evenly."""
    if call.attempts:
        until = end if call.error else end - call.kernel_ns
        each = max(until - begin, 0) // len(call.attempts)
        for n, attempt in enumerate(call.attempts):
            yield attempt, begin + n * each, begin + (n + 1) * each


def _fail(span: Span, code: str, text: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, text[:1024]))


def start(
    tracer: Tracer | None = None, *, share: float = 0.0, meter: Meter | None = None, logger: Logger | None = None
) -> Spans:
    """Make spans of calls of ops and isolated functions of this process, until `stop` or the end of a `with` block.

    A call whose caller's current span is sampled becomes a span below it. share: of calls without a current span, 0 to
    1, so large a part begins a trace of its own. tracer: the global provider's if left out. While this is on, every
    call costs what a trace costs, about a microsecond, and a look at the current span. meter: every call's duration
    goes into a histogram of it, layerzero.call.duration, whose exemplars are sampled calls. logger: a sampled call that
    failed, or that failed somewhere, becomes records with its trace's ids. Raises InvalidArgument, EnvError where the
    installed API has no logs.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise lz.InvalidArgument(f"share is {share!r:.40}; allowed: a part of the calls, 0 to 1")
    durations = None if meter is None else Durations(meter)
    logs = None if logger is None else Logs(logger)
    return Spans(tracer or trace.get_tracer("layerzero", lz.__version__), float(share), durations, logs)
