"""Execution plans as files, which processes without the code that recorded them run (docs/bundles.md)."""
