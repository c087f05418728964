"""The broker's hold on clients' pages of counters: read when somebody asks, and when their client has gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from layerzero.broker.core import events as ev
from layerzero.broker.selection.ranking import Engine
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.shm import counter_page, memory
from layerzero.ipc.shm.counter_page import CounterPage
from layerzero.ipc.shm.counter_words import Growth, Label
from layerzero.ipc.vocabulary.ops import OPS

PAGES_A_STEP = 16


class CounterPages:
    """`handle` is the core's."""

    def __init__(self, engine: Engine, handle: Callable[[ev.Event], None]) -> None:
        self._engine = engine
        self._handle = handle
        self._pages: dict[int, CounterPage] = {}  # by client's number
        self._backends: dict[Label, str] = {}  # of kernels that were asked for
        self._refused: set[int] = set()  # clients whose words made no sense
        self.refusals = 0

    def add(self, client: int, fds: list[int]) -> None:
        """Take a client's page. Raises ProtocolError and OSError; then `fds` are still the caller's."""
        if len(fds) != 1:
            raise ProtocolError(f"add_counters carries one descriptor, got {len(fds)}")
        if client in self._pages or client in self._refused:
            raise ProtocolError("a page of counters is there already")
        memory.check_memfd(fds[0], counter_page.PAGE_BYTES)
        self._pages[client] = CounterPage(fds[0], writable=False)
        os.close(fds[0])

    def poll(self) -> Iterator[None]:
        """Read all pages, some at each step."""
        for n, client in enumerate(list(self._pages), 1):
            self.poll_client(client)
            if not n % PAGES_A_STEP:
                yield

    def poll_client(self, client: int) -> None:
        """One whose words make no sense is read no more: what was read before counts."""
        page = self._pages.get(client)
        if page is None:
            return
        try:
            grown = [(self._backend_of(one), one) for one in page.grown()]
        except ProtocolError as exc:
            log("counters.refused", client=client, error=exc.message)
            self.refusals += 1
            self._refused.add(client)
            self._pages.pop(client).close()
            return
        if grown:
            self._handle(ev.CountersPolled(client, grown))

    def _backend_of(self, one: Growth) -> str:
        """Labels are of what the broker knows, so there is an end to them. Raises ProtocolError."""
        op, kernel_id, _ = one.label
        if not op:
            return ""
        backend = self._backends.get(one.label)
        if backend is None and op in OPS:
            backend = dict(self._engine.kernels(op)).get(kernel_id)
        if backend is None:
            raise ProtocolError(f"counters of {op:.80}, {kernel_id:.80}, which is no kernel of this broker")
        self._backends[one.label] = backend
        return backend

    def end(self, client: int) -> None:
        """It has gone, however: what it has counted stays."""
        self.poll_client(client)
        self._refused.discard(client)
        page = self._pages.pop(client, None)
        if page is not None:
            page.close()

    def close(self) -> None:
        for page in self._pages.values():
            page.close()
        self._pages.clear()
