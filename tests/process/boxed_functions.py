"""Functions for tests/process/test_function_joined.py, in a module of their own: workers import it by its file."""

from __future__ import annotations

import os

import layerzero as lz

BOXED = lz.env("boxed", image="registry.example/boxed:1")


@lz.isolated(BOXED, timeout_s=60)
def pid() -> int:
    return os.getpid()


@lz.isolated(BOXED, placement="auto")
def anywhere() -> int:
    return os.getpid()
