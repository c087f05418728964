"""Traces that policy asks for, or `lz trace on`: of each call a share, by its kernel, in a file for each process."""

from __future__ import annotations

import atexit
import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from layerzero.client.connection import observing
from layerzero.client.connection.call import Route
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.traces.recorder import Buffer, CallEntry, ChainEntry
from layerzero.client.traces.trace import Trace
from layerzero.ipc import kept_files
from layerzero.ipc.errors import LayerZeroError

MOST_CALLS = 10_000
MOST_FILES, MOST_BYTES = 32, 256 << 20  # in the folder
SAVE_S = 30.0
SUFFIX = ".lztrace"


def folder_of(environ: Mapping[str, str]) -> Path:
    """LAYERZERO_TRACE_DIR, or `traces` in the store."""
    if environ.get("LAYERZERO_TRACE_DIR"):
        return Path(environ["LAYERZERO_TRACE_DIR"]).absolute()
    return kept_files.store(environ) / "traces"


def keep_within(folder: Path) -> None:
    """Remove the oldest files until the others are within both bounds."""
    total = 0
    for count, path in enumerate(reversed(kept_files.by_age(folder)), 1):
        total += kept_files.size(path)
        if path.suffix == SUFFIX and count > 1 and (count > MOST_FILES or total > MOST_BYTES):
            kept_files.remove(path)


class _Sampled(deque[tuple[int, Any]]):
    """What the recorder appends to, in the caller's thread, when a call has ended."""

    def __init__(self, shares: Mapping[Route, float]) -> None:
        super().__init__(maxlen=MOST_CALLS)
        self.top = 0.0  # of calls that do not tell their route: those of functions, and what failed
        self._shares = shares
        self._kept = itertools.count(1)

    def append(self, counted: tuple[int, Any]) -> None:
        share = self._share_of(counted[1])
        if share and (share >= 1.0 or random.random() < share):
            super().append((next(self._kept), counted[1]))

    def _share_of(self, entry: Any) -> float:
        if type(entry) is tuple or isinstance(entry, CallEntry):
            record = entry[6]
            if type(record) is tuple:
                return float(record[6].traced)
            return self._shares.get(record.route, 0.0) if isinstance(record, Enqueued) else self.top
        if isinstance(entry, ChainEntry):
            return float(max(step.decision.traced for step in entry.steps))
        return self.top


class _WantedTrace(Trace):
    def __init__(self, shares: Mapping[Route, float]) -> None:
        super().__init__(model=None, most=MOST_CALLS, tensors=False)
        self.sampled = _Sampled(shares)
        self._buffer = Buffer(MOST_CALLS, None)
        self._buffer.calls = self.sampled
        self.saved = 0  # number of the last call in its file


class Wanted:
    """The one of this process. It is on while a route's calls are wanted; its file is written while it is, and at its
    end. What cannot be written is tried again: a call is not to fail of its record."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.problem = ""  # why the file could not be written
        self._lock = threading.Lock()
        self._shares: WeakKeyDictionary[Route, float] = WeakKeyDictionary()
        self._trace: _WantedTrace | None = None
        self._path = Path()
        self._begun = itertools.count()
        self._saving = threading.Lock()
        self._is_over = threading.Event()

    def take(self, route: Route, share: float) -> None:
        """The broker's word on a route. Called by whoever reads it, so that nothing is written here."""
        with self._lock:
            if share:
                self._shares[route] = share
            else:
                self._shares.pop(route, None)
            top = max(self._shares.values(), default=0.0)
            observing.has_traced = bool(top)
            if top and (self._trace is None or self._is_over.is_set()):  # one that is over ends in its own time
                self._begin()
            if self._trace is not None:
                self._trace.sampled.top = top
            if not top:
                self._is_over.set()

    def _begin(self) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._path = folder_of(os.environ) / f"{stamp}-{os.getpid()}-{next(self._begun)}{SUFFIX}"
        self._trace, self._is_over = _WantedTrace(self._shares), threading.Event()
        self._trace.start()
        words = (self._trace, self._path, self._is_over)
        threading.Thread(target=self._run, args=words, name="layerzero.traces", daemon=True).start()

    def _run(self, trace: _WantedTrace, path: Path, is_over: threading.Event) -> None:
        while not is_over.wait(SAVE_S):
            self._save(trace, path)
        trace.stop()
        self._save(trace, path)

    def _save(self, trace: _WantedTrace, path: Path) -> None:
        with self._saving:
            noted = trace.sampled[-1][0] if trace.sampled else 0
            if noted == trace.saved:
                return
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                trace.save(path)
                trace.saved, self.problem = noted, ""
                keep_within(path.parent)
            except (OSError, LayerZeroError) as exc:
                self.problem = str(exc)

    def leave(self) -> None:
        """In a forked child, whose calls are not the parent's; the broker tells it what it wants of it."""
        self._reset()
        observing.has_traced = False

    def end(self) -> None:
        """At the process's end."""
        if self._trace is not None:  # one that is over may not be written yet
            self._save(self._trace, self._path)


wanted = Wanted()
os.register_at_fork(after_in_child=wanted.leave)
atexit.register(wanted.end)
