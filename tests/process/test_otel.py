"""Spans of calls: below the caller's, with attempts as children, and none of what is not sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.backends.toy import KILL, RAISE
from tests.process.harness import Site
from tests.process.test_express import X, bad, settle

import layerzero as lz

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from layerzero import otel


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exported: InMemorySpanExporter) -> Iterator[TracerProvider]:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exported))
    yield made
    made.shutdown()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def test_calls_are_below_the_callers_span(
    new_site: Callable[..., Site], provider: TracerProvider, exported: InMemorySpanExporter
) -> None:
    """On lanes, submitted, from a plan's place in the program; with times within the caller's, and the kernel's within
    the call's. What a backend failed at is a child; a call that fails is an error."""
    site = new_site(standby=0)
    site.start().connect()
    site.wait_ready("alpha", "beta")
    settle()
    tracer = provider.get_tracer("test")
    with otel.start(tracer) as spans:
        lz.silu(X)  # nobody's
        with tracer.start_as_current_span("request"):
            lz.silu(X)
            lz.submit("silu", X).result()
            lz.silu(bad(KILL, "alpha"))
            with pytest.raises(lz.BackendError):
                lz.silu(bad(RAISE))
    assert spans.dropped == 0
    [request] = named(exported, "request")
    calls = named(exported, "layerzero silu")
    assert [call.parent and call.parent.span_id for call in calls] == [request.context.span_id] * 4
    assert {call.context.trace_id for call in calls} == {request.context.trace_id}
    for call in calls:
        assert request.start_time <= call.start_time <= call.end_time <= request.end_time
        children = [
            one for one in exported.get_finished_spans() if one.parent and one.parent.span_id == call.context.span_id
        ]
        for child in children:
            assert call.start_time <= child.start_time <= child.end_time <= call.end_time
    first, _, killed, failed = calls
    assert first.attributes["layerzero.path"] == "express"
    assert first.attributes["layerzero.kernel"] == "alpha.silu"
    assert first.attributes["layerzero.inputs"] == "x 8:float32"
    assert killed.attributes["layerzero.backend"] == "beta"
    died = [one for one in named(exported, "alpha.silu") if one.attributes.get("layerzero.exit_signal") == 9]
    assert [(one.parent.span_id, one.attributes["error.type"]) for one in died] == [
        (killed.context.span_id, "BACKEND_ERROR")
    ]
    assert (killed.status.is_ok, failed.status.is_ok) == (True, False)
    assert failed.attributes["error.type"] == "BACKEND_ERROR"


def test_what_is_not_sampled_has_no_span(
    new_site: Callable[..., Site], provider: TracerProvider, exported: InMemorySpanExporter
) -> None:
    """A caller's span that is not recorded, and calls of nobody but for the share that was asked for."""
    new_site().start().connect()
    tracer = provider.get_tracer("test")
    with otel.start(tracer):
        with TracerProvider(sampler=ALWAYS_OFF).get_tracer("test").start_as_current_span("request"):
            lz.silu(X)
    assert exported.get_finished_spans() == ()
    with otel.start(tracer, share=1) as spans:
        lz.silu(X)
        spans.flush()
        [call] = named(exported, "layerzero silu")
        assert call.parent is None
        lz.silu(X)
    spans.stop()
    assert len({call.context.trace_id for call in named(exported, "layerzero silu")}) == 2
    lz.silu(X)  # after the end
    assert len(named(exported, "layerzero silu")) == 2


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "all", float("nan")])
def test_wrong_shares(share: object) -> None:
    """Before anything is recorded."""
    with pytest.raises(lz.InvalidArgument, match="0 to 1"):
        otel.start(share=share)  # type: ignore[arg-type]


def test_durations_have_exemplars_and_failures_are_logged(
    new_site: Callable[..., Site], provider: TracerProvider
) -> None:
    """The histogram counts every call once; its exemplar is a sampled one. Records have the ids of the call's span."""
    reader, kept = InMemoryMetricReader(), InMemoryLogRecordExporter()
    metrics, logs = MeterProvider([reader]), LoggerProvider()
    logs.add_log_record_processor(SimpleLogRecordProcessor(kept))
    site = new_site(standby=0)
    site.start().connect()
    site.wait_ready("alpha", "beta")
    settle()
    tracer = provider.get_tracer("test")
    with otel.start(tracer, meter=metrics.get_meter("test"), logger=logs.get_logger("test")) as spans:
        for _ in range(20):
            lz.silu(X)  # nobody's
        with tracer.start_as_current_span("request") as request:
            lz.silu(bad(KILL, "alpha"))
            with pytest.raises(lz.BackendError):
                lz.silu(bad(RAISE))
    assert spans.dropped == 0
    data = reader.get_metrics_data()
    assert data is not None
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("layerzero.call.duration", "s")
    points = metric.data.data_points
    assert sum(point.count for point in points) == 22
    assert {point.attributes.get("error.type") for point in points} == {None, "BACKEND_ERROR"}
    ids = {one.trace_id for point in points for one in point.exemplars}
    assert ids == {request.get_span_context().trace_id}
    records = [one.log_record for one in kept.get_finished_logs()]
    assert {one.trace_id for one in records} == ids
    assert all(one.span_id for one in records)
    assert records[0].attributes["event.name"] == "layerzero.call.fell_back"
    assert records[0].attributes["layerzero.exit_signal"] == 9
    assert (records[-1].attributes["event.name"], records[-1].severity_text) == ("layerzero.call.failed", "ERROR")
    metrics.shutdown()
    logs.shutdown()
