"""Copies of inputs that lie outside of arenas and come again: made once, and used as long as the input is the same.

That an address comes again says nothing. A copy is used for memory that nobody can change, being bytes of Python's, or
that was not written since, by what the kernel says of its pages; what lies on the pages at its two ends, beside other
things, is compared. client/session/_kept.h asks the same of a copy that was made here.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.immutable import immutable_owner
from layerzero.client.arrays.recognition import Array, describe
from layerzero.client.connection import arena as arenas
from layerzero.client.connection.arena import Arena
from layerzero.client.connection.written import PAGE, Watcher
from layerzero.ipc.errors import ConfigError, OutOfMemory

VARIABLE = "LAYERZERO_KEPT_MIB"
DEFAULT_MIB = 1024
LEAST_BYTES = 64 << 10  # of an input: less is copied in the time that asking takes
SEEN = 2  # so often it is copied before the copy is kept
ENOUGH = 8  # a copy that served so often is made again at once when its input was written
MAX_FAILURES = 10
REFUSED = 1024  # calls until what could not be kept is tried again
MAX_ENTRIES = 512
NBYTES, COPY, START, END, PAGEMAP, SKIPS, USES = range(7)
"""Words of a row, which _kept.h reads: bytes of the input, address of its copy or 0, its whole pages, or 0 for memory
that nobody can change, where to ask about them, how often it is only copied from now on, how often the copy served."""

IMMUTABLE = "copied once: it is read-only down to bytes, which nobody can change"
UNWRITTEN = "copied once: by what the kernel says it was not written since"
NEW = "a copy is kept when it comes again"
IS_WRITTEN = "copied at each call: it was written since an earlier one"
OVERLAPS = "copied at each call: it shares memory with another input, of which a copy is kept"
_COULD_CHANGE = "copied at each call: it could change"


def limit_bytes(environ: Mapping[str, str]) -> int:
    """Of all copies that are kept. Raises ConfigError."""
    text = environ.get(VARIABLE, "").strip() or str(DEFAULT_MIB)
    if not text.isdecimal() or int(text) > 1 << 40:
        raise ConfigError(f"{VARIABLE} is {text!r:.40}; allowed: MiB of copies that are kept, such as 512; 0 for none")
    return int(text) << 20


class Entry:
    """An input that has come: its copy, if one is kept, and for reports why it is, or is not."""

    __slots__ = ("__weakref__", "failures", "hold", "memory", "place", "row", "seen_uses", "source", "told")

    def __init__(self, nbytes: int) -> None:
        self.row = array("Q", (nbytes, 0, 0, 0, 0, SEEN - 1, 0))
        self.memory: memoryview | None = None
        self.place: tuple[Arena, int] | None = None
        self.told = NEW
        self.hold: bytes | None = None  # what cannot be changed, so that its memory is nothing else's
        self.source: weakref.ref[Any] | None = None
        self.failures = self.seen_uses = 0


class Found(NamedTuple):
    """A copy that is as its input is now, where there is one; in any case what a report is to say."""

    memory: memoryview | None
    place: tuple[Arena, int] | None
    told: str
    uses: int  # of the copy, before this one


class KeptCopies:
    """Of this process, by the address of the input. Threads may share it."""

    def __init__(self, pool: arenas.Pool) -> None:
        self.entries: dict[int, Entry] = {}
        self._pool, self._lock, self._is_inside = pool, threading.RLock(), False
        self._watcher: Watcher | None = None
        self._gone: deque[tuple[int, int]] = deque()  # pages of inputs that were collected
        self._limit_bytes: int | None = None

    def find(self, given: Array) -> Found | None:
        """None for an input that is too small, of another library, or where no copies are kept."""
        with self._lock:
            entry = self._look(given)
            return None if entry is None else Found(entry.memory, entry.place, entry.told, entry.row[USES])

    def look(self, obj: Any) -> Entry | None:
        """As `find`, for _kept.h, which asks the entry itself."""
        with self._lock:
            return self._look(describe(obj))

    def clear(self) -> None:
        """Keep none of those that are kept."""
        with self._lock:
            for entry in list(self.entries.values()):
                self._drop(entry)
            self.entries.clear()

    def close(self) -> None:
        """In a forked child: what is watched is the parent's."""
        if self._watcher is not None:
            self._watcher.close()

    def _look(self, given: Array) -> Entry | None:
        if given.nbytes < LEAST_BYTES or given.kind not in ("numpy", "torch") or self._is_inside:
            return None  # inside: a finalizer of the program's makes a call, in the middle of this
        self._is_inside = True
        try:
            if self._limit_bytes is None:
                self._limit_bytes = limit_bytes(os.environ)
            self._collect()
            return self._entry_of(given) if self._limit_bytes else None
        finally:
            self._is_inside = False

    def _entry_of(self, given: Array) -> Entry:
        entry = self.entries.get(given.address)
        if entry is None or entry.row[NBYTES] != given.nbytes:
            return self._begin(given, entry)
        row = entry.row
        if row[COPY]:
            if self._holds(row, given.address):
                row[USES] += 1
                return entry
            self._was_in_vain(entry, IS_WRITTEN)
        if row[SKIPS]:
            row[SKIPS] -= 1
        else:
            self._keep(entry, given)
        return entry

    def _begin(self, given: Array, before: Entry | None) -> Entry:
        if before is not None:
            self._drop(before)
        elif len(self.entries) >= MAX_ENTRIES:
            self._make_room()
        self.entries[given.address] = made = Entry(given.nbytes)
        made.source = weakref.ref(_memory_of(given.owner), self._on_collected(given.address, made))
        return made

    def _make_room(self) -> None:
        """The one that came first goes, unless its copy served since that was asked last."""
        for _ in range(MAX_ENTRIES):
            address = next(iter(self.entries))
            entry = self.entries.pop(address)
            if not entry.row[COPY] or entry.seen_uses == entry.row[USES]:
                self._drop(entry)
                return
            entry.seen_uses = entry.row[USES]
            self.entries[address] = entry

    def _holds(self, row: array[int], address: int) -> bool:
        start, end = row[START], row[END]
        if not end:
            return True
        if self._watcher is None or not self._watcher.is_unwritten(start, end):
            return False
        last = address + row[NBYTES]
        return _are_equal(address, row[COPY], start - address) and _are_equal(
            end, row[COPY] + end - address, last - end
        )

    def _was_in_vain(self, entry: Entry, told: str) -> None:
        """Its copy does not hold any more. Made again at once where it served often, else after ever more calls."""
        row = entry.row
        uses = row[USES]
        self._drop(entry)
        entry.failures = 0 if uses >= ENOUGH else min(entry.failures + 1, MAX_FAILURES)
        entry.told, row[SKIPS] = told, ENOUGH << entry.failures if entry.failures else 0

    def _drop(self, entry: Entry) -> None:
        """Calls that are under way keep its memory."""
        row = entry.row
        row[COPY] = 0
        if row[END] and self._watcher is not None:
            self._watcher.leave(row[START], row[END])
        row[START] = row[END] = row[USES] = entry.seen_uses = 0
        entry.memory = entry.place = entry.hold = None
        self._rest()

    def _rest(self) -> None:
        """Where nothing is watched, no descriptor is open."""
        if self._watcher is not None and not any(entry.row[END] for entry in list(self.entries.values())):
            self._watcher.close()
            self._watcher = None

    def _keep(self, entry: Entry, given: Array) -> None:
        why = self._why_not(entry, given)
        if why:
            entry.told, entry.row[SKIPS] = f"{_COULD_CHANGE}, and {why}", REFUSED
            return
        row = entry.row
        try:
            memory, arena, offset = self._pool.allocate(given.nbytes)
        except OutOfMemory:
            self._drop(entry)
            entry.told, row[SKIPS] = "copied at each call: there is no memory to keep a copy", REFUSED
            return
        copy_into(given, memory)
        entry.memory, entry.place = memory, (arena, offset)
        row[COPY] = arena.address + offset  # last: from now on it may be used

    def _why_not(self, entry: Entry, given: Array) -> str:
        """Begins to watch it where that is needed; else says why no copy is kept."""
        assert self._limit_bytes is not None
        used = sum(one.row[NBYTES] for one in self.entries.values() if one.row[COPY])
        if used + given.nbytes > self._limit_bytes:
            return f"copies of {used >> 20} MiB are kept already, {self._limit_bytes >> 20} at most ({VARIABLE})"
        row = entry.row
        hold = immutable_owner(given.owner)
        if hold is None:
            start, end = -(-given.address // PAGE) * PAGE, (given.address + given.nbytes) // PAGE * PAGE
            self._forget_overlapping(start, end)
            if self._watcher is None:
                self._watcher = Watcher()
            why = self._watcher.watch(start, end)
            if why:
                self._rest()
                return why
            row[START], row[END], row[PAGEMAP] = start, end, self._watcher.pagemap
        entry.hold, entry.told = hold, UNWRITTEN if hold is None else IMMUTABLE
        return ""

    def _forget_overlapping(self, start: int, end: int) -> None:
        """What was written there before would be forgotten for them, too."""
        for other in list(self.entries.values()):
            if other.row[START] < end and start < other.row[END]:
                self._was_in_vain(other, OVERLAPS)

    def _on_collected(self, address: int, entry: Entry) -> Any:
        """Runs wherever the input is collected, also in the middle of anything here: takes no lock."""
        entries, gone, known = self.entries, self._gone, weakref.ref(entry)
        is_finalizing = sys.is_finalizing  # by then the modules have lost their names

        def forget(_: object) -> None:
            found = known()
            if found is None or is_finalizing():
                return
            row = found.row
            row[COPY] = 0
            if row[END]:
                gone.append((row[START], row[END]))
            row[START] = row[END] = 0
            found.memory = found.place = found.hold = None
            if entries.get(address) is found:
                del entries[address]
            if self._lock.acquire(blocking=False):  # else it is the next call's
                try:
                    if not self._is_inside:
                        self._collect()
                finally:
                    self._lock.release()

        return forget

    def _collect(self) -> None:
        if not self._gone:
            return
        while self._gone:
            start, end = self._gone.popleft()
            if self._watcher is not None:
                self._forget_overlapping(start, end)  # the memory may be another one's by now, and be watched for it
                self._watcher.leave(start, end)
        self._rest()


def _memory_of(obj: Any) -> Any:
    """What lives as long as an array's memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return obj.untyped_storage()
    while isinstance(obj.base, sys.modules["numpy"].ndarray):
        obj = obj.base
    return obj


def _are_equal(one: int, other: int, nbytes: int) -> bool:
    return ctypes.string_at(one, nbytes) == ctypes.string_at(other, nbytes)


copies = KeptCopies(arenas.pool)


def _after_fork() -> None:
    global copies
    copies.close()
    copies = KeptCopies(arenas.pool)


os.register_at_fork(after_in_child=_after_fork)
