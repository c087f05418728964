"""Coroutines and asynchronous generators of users' functions: run to completion on one event loop of the worker."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class EventLoop:
    """The loop that all of them run on, made when it is needed first: what one has opened, such as a connection, the
    next may use. Tasks that are left over go on while the next one runs."""

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None

    def complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Its result. Raises what it raises."""
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(coroutine)

    def next_of(self, iterator: Any) -> Any:
        """The next item. Raises StopIteration at the end, and what it raises."""

        async def one() -> list[Any]:
            try:
                return [await anext(iterator)]
            except StopAsyncIteration:
                return []

        found = self.complete(one())
        if not found:
            raise StopIteration
        return found[0]
