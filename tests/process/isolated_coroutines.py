"""Coroutines for tests/process/test_function_coroutines.py, in a module of their own: workers import it by its file."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import layerzero as lz

PLAIN = lz.env("plain")
_lock: Any = None


@lz.isolated(PLAIN)
async def total(values: list[int]) -> int:
    """Many at once, on one loop."""
    return sum(await asyncio.gather(*(later(value) for value in values)))


async def later(value: int) -> int:
    await asyncio.sleep(0)
    return value


@lz.isolated(PLAIN)
async def same_loop() -> int:
    """A lock belongs to the loop that it was used on first."""
    global _lock
    _lock = _lock or asyncio.Lock()
    async with _lock:
        return os.getpid()


@lz.isolated(PLAIN)
async def fails(text: str) -> None:
    await asyncio.sleep(0)
    raise LookupError(text)


@lz.isolated(PLAIN, timeout_s=0.5)
async def never_ends() -> None:
    await asyncio.Event().wait()


@lz.isolated(PLAIN)
async def count(end: int, notes: str) -> AsyncIterator[int]:
    try:
        for number in range(end):
            await asyncio.sleep(0)
            yield number
    finally:
        with Path(notes).open("a") as file:
            file.write("closed\n")


@lz.isolated(PLAIN, keep=True)
def numbers(values: list[int]) -> list[int]:
    return list(values)


@lz.isolated(PLAIN, on_death="rebuild")
class Store:
    def __init__(self, start: int) -> None:
        self.start = start

    async def add(self, value: int) -> int:
        self.start += await later(value)
        return self.start

    async def items(self) -> AsyncIterator[int]:
        for number in range(self.start):
            yield await later(number)

    @classmethod
    async def named(cls) -> str:
        await asyncio.sleep(0)
        return cls.__name__

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def here(text: str) -> str:
    return f"here {text}"


async def async_here(text: str) -> str:
    return text
