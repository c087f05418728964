"""Calls of this process, recorded while a trace is on: lz.trace (docs/traces.md)."""
