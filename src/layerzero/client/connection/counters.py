"""Calls of this process that pass the broker by, counted in a page that the broker reads (ipc/shm/counter_page.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from layerzero.ipc.errors import LayerZeroError, NotConnected, OutOfMemory
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.counter_page import PAGE_BYTES, ROW_BYTES, CounterPage
from layerzero.ipc.shm.counter_words import Label

Row: TypeAlias = int
"""A row of the page, by its address in this process; 0: nothing is counted."""


class Counters:
    """Of one connection. Threads may share it. Whoever has a row keeps the connection."""

    def __init__(self, show: Callable[[int], None] | None) -> None:
        """`show` shows the broker the page, by its descriptor, and raises what the broker refuses it with; None for a
        broker that wants none."""
        self._show = show
        self._lock = threading.Lock()
        self._page: CounterPage | None = None
        self._rows: dict[Label, Row] = {}
        self.compiled: Callable[[Row, int, int, int], None] | None = None  # counts as `count`, in C
        self.why_not = "" if show is not None else "the broker's settings say so"  # it does not count

    def row(self, op: str, kernel_id: str, path: str) -> Row:
        """The row of calls like this one. `path`: one of PATHS. For what makes many of them: a first row tells the
        broker of the page."""
        label = Label(op, kernel_id, path)
        found = self._rows.get(label)
        if found is not None:
            return found
        if self.why_not or not self._has_page():
            return 0
        with self._lock:
            assert self._page is not None
            found = self._rows.get(label)
            if found is None:
                found = self._rows[label] = self._page.address + ROW_BYTES * self._page.open_row(label)
        return found

    def _has_page(self) -> bool:
        """Whether the broker has the page now. Calls go on without: this raises nothing."""
        if self._page is not None:
            return True
        with self._lock:
            if self._page is None and self._show is not None and not self.why_not:
                try:
                    self._page = self._make()
                except (OSError, OutOfMemory) as exc:
                    self.why_not = f"there is no page for it: {exc}"
                except NotConnected:
                    return False
                except LayerZeroError as exc:  # whoever calls finds out, too
                    self.why_not = exc.message
        return self._page is not None

    def _make(self) -> CounterPage:
        assert self._show is not None
        fd = memory.create_memfd("lz-counters", PAGE_BYTES)
        try:
            page = CounterPage(fd, writable=True)
            self._show(fd)
            return page
        finally:
            os.close(fd)

    def count(self, row: Row, ns: int, copied_bytes: int = 0, times: int = 1) -> None:
        """A call that ended well after so many ns, or so many calls, each after so many."""
        if not row:
            return
        if self.compiled is not None:
            self.compiled(row, ns, copied_bytes, times)
            return
        with self._lock:
            page, number = self._of(row)
            page.count(number, ns, copied_bytes, times)

    def note_copied(self, row: Row, nbytes: int) -> None:
        """For a call of a path of which nothing is counted here, or in C."""
        if row:
            with self._lock:
                page, number = self._of(row)
                page.note_copied(number, nbytes)

    def note_error(self, row: Row, code: str) -> None:
        """A call that ended in an error which the broker has not seen."""
        if row:
            with self._lock:
                page, number = self._of(row)
                page.note_error(number, code)

    def note_fallback(self, row: Row, code: str) -> None:
        """An attempt failed that the broker has not seen; the call goes on."""
        if row:
            with self._lock:
                page, number = self._of(row)
                page.note_fallback(number, code)

    def _of(self, row: Row) -> tuple[CounterPage, int]:
        assert self._page is not None
        return self._page, (row - self._page.address) // ROW_BYTES
