"""PerfTable: times of kernels as samples per (kernel, bucket of calls), and their statistics. `note` runs on every
answer."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import islice

WINDOW = 64  # newest clean samples per row
ENOUGH = 16  # fresh samples that outweigh whatever was stored
MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Stat:
    """Statistics of a kernel's clean runs on calls of one bucket. `warmup_ms`: its newest first run, with compilation;
    0.0 when none was seen."""

    count: int
    median_us: float
    p95_us: float
    variance_us: float  # us squared
    warmup_ms: float
    measured_at_s: float  # the broker's monotonic clock

    @property
    def is_stable(self) -> bool:
        """Whether the runs are enough, and their spread is below a fifth of the median."""
        return self.count >= ENOUGH and self.variance_us <= (0.2 * self.median_us) ** 2


@dataclass(frozen=True, slots=True)
class PerfRow:
    """A statistic with its place in the table: what the database stores and gives back."""

    kernel_id: str
    key: str
    stat: Stat


class _Row:
    """Samples of one kernel and bucket: those of this broker, and the statistics that were stored before it."""

    __slots__ = ("cached", "measured_at_s", "samples", "stored", "total", "warmup_ms")

    def __init__(self, stored: Stat | None = None) -> None:
        self.samples: list[float] = []
        self.total = 0  # clean samples, those that have left the window too
        self.stored = stored
        self.warmup_ms = stored.warmup_ms if stored else 0.0
        self.measured_at_s = stored.measured_at_s if stored else -math.inf
        self.cached: Stat | None = None

    def add(self, us: float) -> None:
        if len(self.samples) < WINDOW:
            self.samples.append(us)
        else:
            self.samples[self.total % WINDOW] = us
        self.total += 1
        self.cached = None

    def stat(self) -> Stat | None:
        if self.cached is None:
            if self.samples:
                self.cached = self._merged()
            elif self.stored is not None:
                self.cached = replace(self.stored, warmup_ms=self.warmup_ms)
        return self.cached

    def _merged(self) -> Stat:
        """Fresh samples, blended with what was stored until there are ENOUGH of them."""
        ordered = sorted(self.samples)
        n = len(ordered)
        median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
        p95 = ordered[math.ceil(0.95 * n) - 1]
        mean = math.fsum(ordered) / n
        variance = math.fsum((x - mean) ** 2 for x in ordered) / (n - 1) if n > 1 else 0.0
        old = self.stored
        if old is None:
            return Stat(self.total, median, p95, variance, self.warmup_ms, self.measured_at_s)
        share = min(1.0, self.total / ENOUGH)
        return Stat(
            old.count + self.total,
            old.median_us + (median - old.median_us) * share,
            old.p95_us + (p95 - old.p95_us) * share,
            old.variance_us + (variance - old.variance_us) * share,
            self.warmup_ms,
            self.measured_at_s,
        )


class PerfTable:
    """Rows of samples by (kernel, bucket). Of more than `max_rows`, the row that was noted longest ago is let go."""

    def __init__(self, *, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._rows: OrderedDict[tuple[str, str], _Row] = OrderedDict()
        self._dirty: dict[tuple[str, str], None] = {}  # in order of the first change

    def __len__(self) -> int:
        return len(self._rows)

    def note(
        self, kernel_id: str, key: str, us: float, now_s: float, *, is_warmup: bool = False, is_clean: bool = True
    ) -> None:
        """Take one run's kernel time. `is_warmup`: a first run, kept apart. `is_clean`: nothing disturbed it."""
        if not is_clean or not 0.0 < us < math.inf:
            return
        place = (kernel_id, key)
        row = self._rows.get(place)
        if row is None:
            row = self._insert(place, _Row())
        else:
            self._rows.move_to_end(place)
        if is_warmup:
            row.warmup_ms, row.cached = us / 1e3, None
            if row.measured_at_s == -math.inf:
                row.measured_at_s = now_s
        else:
            row.measured_at_s = now_s
            row.add(us)
        self._dirty[place] = None

    def stat(self, kernel_id: str, key: str) -> Stat | None:
        """The kernel's times for calls of this bucket; None while it has no clean run."""
        row = self._rows.get((kernel_id, key))
        return None if row is None else row.stat()

    def samples(self, kernel_id: str, key: str) -> list[float]:
        """The newest clean runs on calls of this bucket that this broker has seen, in microseconds, in no order."""
        row = self._rows.get((kernel_id, key))
        return [] if row is None else list(row.samples)

    def load(self, rows: Iterable[PerfRow]) -> int:
        """Take what an earlier broker stored, newest first; samples of this run stay. Returns how many there was
        room for."""
        loaded = 0
        for stored in rows:
            place = (stored.kernel_id, stored.key)
            row = self._rows.get(place)
            if row is not None:
                row.stored, row.cached = stored.stat, None
                row.warmup_ms = row.warmup_ms or stored.stat.warmup_ms
                row.measured_at_s = max(row.measured_at_s, stored.stat.measured_at_s)
            elif len(self._rows) < self._max_rows:
                self._rows[place] = _Row(stored.stat)
                self._rows.move_to_end(place, last=False)  # older than what this run has noted: the first to go
            else:
                continue
            loaded += 1
        return loaded

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    def take_dirty(self, limit: int = 64) -> list[PerfRow]:
        """Up to `limit` rows with news since they were last taken, for the database; about 15 us each.

        Rows that have only warmed up wait for a clean run.
        """
        rows = []
        for place in list(islice(self._dirty, limit)):
            stat = self._rows[place].stat()
            del self._dirty[place]
            if stat is not None:
                rows.append(PerfRow(*place, stat))
        return rows

    def forget(self, kernel_ids: Collection[str]) -> None:
        """Drop the rows of these kernels."""
        for place in [place for place in self._rows if place[0] in kernel_ids]:
            del self._rows[place]
            self._dirty.pop(place, None)

    def _insert(self, place: tuple[str, str], row: _Row) -> _Row:
        self._rows[place] = row
        self._rows.move_to_end(place)
        if len(self._rows) > self._max_rows:
            oldest, _ = self._rows.popitem(last=False)
            self._dirty.pop(oldest, None)
        return row
