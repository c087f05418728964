"""Spans of calls for OpenTelemetry: `from layerzero import otel; otel.start()`. Extra `otel`: docs/traces.md."""

from layerzero.otel.spans import Spans, start

__all__ = ["Spans", "start"]
