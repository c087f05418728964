"""Runs inside a foreign environment, one process per backend: imports layerzero.ipc and the stdlib, and one library."""
