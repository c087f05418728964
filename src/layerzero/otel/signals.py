"""What OpenTelemetry takes of calls beside spans: how long they took, as a histogram whose exemplars lead to spans, and
records of those that failed, with the ids of their traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import layerzero as lz
from layerzero.client.traces.calls import RecordedCall

if TYPE_CHECKING:
    from opentelemetry._logs import Logger  # type: ignore[attr-defined,unused-ignore]
    from opentelemetry.context.context import Context
    from opentelemetry.metrics import Meter  # type: ignore[attr-defined,unused-ignore]

DURATION = "layerzero.call.duration"
# Seconds; those that semantic conventions advise begin at 5 ms, where few calls are.
BOUNDS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0)
FELL_BACK, FAILED = "layerzero.call.fell_back", "layerzero.call.failed"


class Durations:
    """Of every call, in a histogram of this meter."""

    def __init__(self, meter: Meter) -> None:
        about = "how long calls of ops and isolated functions took, seen from their caller"
        try:
            self._histogram = meter.create_histogram(
                DURATION, unit="s", description=about, explicit_bucket_boundaries_advisory=BOUNDS
            )
        except TypeError:  # of an API before 1.30: with the SDK's own bounds
            self._histogram = meter.create_histogram(DURATION, unit="s", description=about)

    def note(self, call: RecordedCall, context: Context | None) -> None:
        """`context`: with the call's span, where it is sampled; the SDK makes an exemplar of it."""
        its: dict[str, str] = {"layerzero.op": call.name}
        for name in ("backend", "path"):
            if value := getattr(call, name):
                its[f"layerzero.{name}"] = value
        if call.error:
            its["error.type"] = call.error.partition(":")[0]
        self._histogram.record(max(call.end_ns - call.start_ns, 0) / 1e9, its, context)


class Logs:
    """Of calls that failed somewhere, or everywhere. Raises EnvError where OpenTelemetry's API has no logs."""

    def __init__(self, logger: Logger) -> None:
        try:
            from opentelemetry import _logs

            api: Any = _logs
            self._record, severities = api.LogRecord, api.SeverityNumber
        except (ImportError, AttributeError) as exc:
            raise lz.EnvError(
                f"this version of opentelemetry-api has no logs: {exc}", repair="pip install -U opentelemetry-api"
            ) from exc
        self._logger, self._warning, self._error = logger, severities.WARN, severities.ERROR

    def note(self, call: RecordedCall, span: Any, at_ns: int) -> None:
        """One record for each attempt that failed, and one for a call that did; in the trace of `span`."""
        where = span.get_span_context()
        for name, severity, text, its in self._of(call):
            made = self._record(
                timestamp=at_ns,
                observed_timestamp=at_ns,
                trace_id=where.trace_id,
                span_id=where.span_id,
                trace_flags=where.trace_flags,
                severity_number=severity,
                severity_text=severity.name,
                body=text[:1024],
                attributes={"event.name": name, "layerzero.op": call.name, **its},
            )
            self._logger.emit(made)

    def _of(self, call: RecordedCall) -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
        for one in call.attempts:
            its = {"layerzero.kernel": one.kernel_id, "layerzero.backend": one.backend, "process.pid": one.worker_pid}
            more = {} if one.exit_signal is None else {"layerzero.exit_signal": one.exit_signal}
            said = f"{one.kernel_id} failed: {one.detail}"
            yield FELL_BACK, self._warning, said, {**its, **more, "error.type": one.outcome or "OTHER"}
        if call.error:
            yield FAILED, self._error, call.error, {"error.type": call.error.partition(":")[0]}
