"""Measured times that outlive the broker. All file work is on one thread of its own: the loop only hands over and
takes, and a call never waits for a disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from layerzero.broker.selection.timings import PerfRow, Stat
from layerzero.broker.storage.perf_rows import Identity, Measurement
from layerzero.broker.storage.perf_store import MAX_BYTES, Damaged, Store, Unavailable
from layerzero.ipc.logs import log

MAX_PENDING = 8192  # rows that wait for the file
RETRY_S = 30.0  # after a file could not be opened

_Place = tuple[str, ...]


class PerfDB:
    """The database of measured times in the file `path`, with a thread of its own. `on_loaded(backend, rows)` is called
    on that thread for each `identify`.

    The file is opened after the constructor has returned. A file that cannot be used is a text in `problems`, and the
    broker goes on with what it measures itself.
    """

    def __init__(
        self,
        path: Path,
        on_loaded: Callable[[str, list[PerfRow]], None],
        *,
        retry_s: float = RETRY_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.path = path
        self.dropped = 0  # rows that were not stored: no room to wait, no backend known, or the broker ended first
        self.stored = 0
        self.loaded = 0
        self._on_loaded = on_loaded
        self._retry_s = retry_s
        self._max_bytes = max_bytes
        self._problems: dict[str, str] = {}
        self._changed = threading.Condition()
        self._asked = self._done = 0  # turns of the thread
        self._is_closing = False
        self._measurements: dict[_Place, Measurement] = {}
        self._identities: dict[str, Identity] = {}
        self._backend_of: dict[str, str] = {}
        # The thread's own:
        self._store: Store | None = None
        self._retry_at_s = 0.0
        self._known: dict[str, Identity] = {}  # backends whose rows were loaded
        self._thread = threading.Thread(target=self._run, name="perfdb", daemon=True)
        self._thread.start()

    # --- for the loop: none of these waits for the file

    def identify(self, backend: str, identity: Identity, kernel_ids: Iterable[str]) -> None:
        """Say what measurements of this backend depend on from now on, which is its `identity`; the rows stored with it
        will be loaded.

        Rows of another identity (driver, toolkit, library, descriptor or environment changed) stay in the file and do
        not count.
        """
        with self._changed:
            self._identities[backend] = identity
            for kernel_id in kernel_ids:
                self._backend_of[kernel_id] = backend
            self._ask()

    def save(self, rows: Iterable[PerfRow]) -> None:
        """Hand over what PerfTable.take_dirty gave."""
        wall_s = time.time() - time.monotonic()
        with self._changed:
            for row in rows:
                backend = self._backend_of.get(row.kernel_id)
                if backend is None:
                    self._drop("kernels that no backend was identified for", 1)
                    continue
                self._keep(measurement(row, backend, self._identities[backend], wall_s))
            self._ask()

    def close(self, timeout_s: float = 1.0) -> bool:
        """Store what waits and end the thread. False: the thread is not through with it after `timeout_s`; the file is
        safe all the same."""
        with self._changed:
            self._is_closing = True
            self._ask()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Block until all that was handed over so far was worked on; False when that takes longer than `timeout_s`. For
        tests, and for a start that wants stored rows."""
        with self._changed:
            turn = self._asked
            return self._changed.wait_for(lambda: self._done >= turn or not self._thread.is_alive(), timeout_s)

    @property
    def problems(self) -> list[str]:
        with self._changed:
            return [f"measured times ({self.path}): {text}" for text in self._problems.values()]

    def facts(self) -> dict[str, Any]:
        """For `lz status`."""
        with self._changed:
            store = self._store
            mode = "memory" if store is None else "read_only" if store.is_read_only else "file"
            return {
                "path": str(self.path),
                "mode": mode,
                "loaded": self.loaded,
                "stored": self.stored,
                "waiting": len(self._measurements),
                "dropped": self.dropped,
            }

    def _ask(self) -> None:
        self._asked += 1
        self._changed.notify_all()

    def _keep(self, row: Measurement) -> None:
        """Let a row wait for the file; a newer one takes the place of an older one."""
        place = (row.kernel_id, row.key, row.identity)
        if place in self._measurements or len(self._measurements) < MAX_PENDING:
            self._measurements[place] = row
            return
        self._drop(f"more than {MAX_PENDING} rows wait for the file", 1)

    def _drop(self, why: str, count: int) -> None:
        self.dropped += count
        self._problems["dropped"] = f"{self.dropped} rows were not stored: {why}"

    # --- the thread

    def _run(self) -> None:
        is_over = False
        while not is_over:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._is_closing)
                turn, is_over = self._asked, self._is_closing
            try:
                self._turn(is_over)
            except Exception as exc:  # a thread that ended silently would store nothing for the rest of the day
                self._tell("fault", f"{type(exc).__name__}: {exc}")
                self._close_store()
            with self._changed:
                self._done = turn
                self._changed.notify_all()
        self._close_store()
        with self._changed:
            if lost := len(self._measurements):
                self._drop("the broker ended while the file could not be written", lost)

    def _turn(self, is_last: bool) -> None:
        damage = ""
        if self._store is not None and self._store.is_read_only and time.monotonic() >= self._retry_at_s:
            self._close_store()  # perhaps it can be written by now
        try:
            for _ in range(2):  # once more with a new file when this one turns out to be damaged
                try:
                    if self._store is None and not self._open(is_last, damage):
                        return
                    self._load()
                    self._write()
                    return
                except Damaged as exc:
                    damage = str(exc)
                    self._close_store()
            self._retry_at_s = time.monotonic() + self._retry_s
            self._tell("unavailable", f"damaged again as soon as it was begun anew: {damage}")
        except Unavailable as exc:
            self._tell("unavailable", f"{exc}; what was measured waits in memory")

    def _open(self, is_last: bool, damage: str) -> bool:
        if time.monotonic() < self._retry_at_s and not is_last:
            return False
        try:
            store, problem = Store.open(self.path, max_bytes=self._max_bytes, damage=damage)
        except Unavailable as exc:
            self._retry_at_s = time.monotonic() + self._retry_s
            self._tell("unavailable", f"{exc}; what is measured stays in memory until the file can be used")
            return False
        with self._changed:
            self._store = store
            if not store.is_read_only:
                self._problems.pop("unavailable", None)
        if problem:
            self._tell("unavailable" if store.is_read_only else "renamed", problem)
        if store.is_read_only:
            self._retry_at_s = time.monotonic() + self._retry_s
            return True
        store.prune()
        log("perfdb.opened", **self.facts())
        return True

    def _load(self) -> None:
        store = self._store
        assert store is not None
        with self._changed:
            wanted = {b: i for b, i in self._identities.items() if self._known.get(b) != i}
        wall_s = time.time()
        for backend, identity in wanted.items():
            rows = store.load(backend, identity)
            self._known[backend] = identity
            self.loaded += len(rows)
            self._on_loaded(backend, perf_rows(rows, time.monotonic(), wall_s))
        if store.damaged_rows:
            self._tell("rows", f"{store.damaged_rows} damaged rows were left out")

    def _write(self) -> None:
        store = self._store
        assert store is not None
        if store.is_read_only:
            return
        with self._changed:
            measurements, self._measurements = self._measurements, {}
            used = {row.identity for row in measurements.values()}
            identities = [identity for identity in self._identities.values() if identity.hash in used]
        if not measurements:
            return
        try:
            store.save(identities, measurements.values())
        except (Unavailable, Damaged):
            with self._changed:  # newer ones that came meanwhile win
                newer, self._measurements = self._measurements, measurements
                for row in newer.values():
                    self._keep(row)
            raise
        with self._changed:
            self.stored += len(measurements)
            self._problems.pop("unavailable", None)

    def _tell(self, kind: str, text: str) -> None:
        """A problem for `lz status` and, when it is news, for the log."""
        with self._changed:
            is_news = self._problems.get(kind) != text
            self._problems[kind] = text
        if is_news:
            log("perfdb.problem", path=str(self.path), problem=text)

    def _close_store(self) -> None:
        with self._changed:
            store, self._store = self._store, None
        if store is not None:
            store.close()


def measurement(row: PerfRow, backend: str, identity: Identity, wall_s: float) -> Measurement:
    """`wall_s`: seconds since 1970 at the zero of the broker's clock."""
    stat = row.stat
    at = max(wall_s + stat.measured_at_s, 0.0)
    figures = (stat.count, stat.median_us, stat.p95_us, stat.variance_us, stat.warmup_ms)
    return Measurement(row.kernel_id, row.key, identity.hash, backend, *figures, at)


def perf_rows(rows: Iterable[Measurement], now_s: float, wall_s: float) -> list[PerfRow]:
    """Stored rows on the broker's clock; a time in the future (somebody set the clock) counts as now."""
    return [
        PerfRow(
            row.kernel_id,
            row.key,
            Stat(
                row.count,
                row.median_us,
                row.p95_us,
                row.variance_us,
                row.warmup_ms,
                now_s - max(wall_s - row.measured_at, 0.0),
            ),
        )
        for row in rows
    ]
