"""What happened between two answers of the broker to the question `metrics`: a Sample. Plain values, which JSON has."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.ipc.shm.counter_words import BUCKETS

Key = tuple[str, ...]  # labels, as its field says which
GAUGES = ("clients", "open_calls", "lanes", "problems", "epoch", "host_bytes", "gpu_bytes")
UNSEEN = ("absent",)  # states of workers of which nothing is said
OTHER = "other"


@dataclass(slots=True)
class Durations:
    """Calls by how long they took: `buckets` has how many took at most 2**n us and more than half of that."""

    count: int = 0
    sum_ns: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, other: Durations) -> None:
        self.count += other.count
        self.sum_ns += other.sum_ns
        for n, count in other.buckets.items():
            self.buckets[n] = self.buckets.get(n, 0) + count

    def quantile_us(self, share: float) -> float | None:
        """How long so large a share of the calls took at most, in us; within a bucket as if they lay there evenly by
        their logarithm. None without calls."""
        total = sum(self.buckets.values())
        if not total:
            return None
        wanted, seen = share * total, 0
        for n in sorted(self.buckets):
            count = self.buckets[n]
            if seen + count >= wanted:
                part = (wanted - seen) / count
                return float(2.0 ** (n - 1 + part) if n else part)
            seen += count
        return float(2.0 ** max(self.buckets))

    @property
    def mean_us(self) -> float | None:
        return self.sum_ns / 1e3 / self.count if self.count else None


@dataclass(slots=True)
class Worker:
    """`memory_bytes`: of its process, which it has not shared; `gpu_bytes`: of all GPUs. 0 where nobody tells."""

    state: str
    running: int = 0
    waiting: int = 0
    enqueued: int = 0
    memory_bytes: int = 0
    gpu_bytes: int = 0

    @property
    def is_busy(self) -> bool:
        return self.state == "ready" and self.running > 0


@dataclass(slots=True)
class Sample:
    """What happened in `seconds`. Keys: of `calls` op, backend, path; of `queued` the op; of `errors` and `fallbacks`
    op, backend, code; of `restarts` backend and cause. Gauges are the highest in that time, states the last."""

    seconds: float = 0.0
    calls: dict[Key, Durations] = field(default_factory=dict)
    queued: dict[Key, Durations] = field(default_factory=dict)
    errors: dict[Key, int] = field(default_factory=dict)
    fallbacks: dict[Key, int] = field(default_factory=dict)
    restarts: dict[Key, int] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    def add(self, later: Sample) -> None:
        """Both times together."""
        self.seconds += later.seconds
        for mine, its in ((self.calls, later.calls), (self.queued, later.queued)):
            for key, durations in its.items():
                mine.setdefault(key, Durations()).add(durations)
        for counts, more in (
            (self.errors, later.errors),
            (self.fallbacks, later.fallbacks),
            (self.restarts, later.restarts),
        ):
            for key, count in more.items():
                counts[key] = counts.get(key, 0) + count
        for name, worker in later.workers.items():
            before = self.workers.get(name)
            self.workers[name] = Worker(
                worker.state,
                *(
                    max(getattr(worker, what), getattr(before, what) if before else 0)
                    for what in ("running", "waiting", "enqueued", "memory_bytes", "gpu_bytes")
                ),
            )
        for name, value in later.gauges.items():
            self.gauges[name] = max(value, self.gauges.get(name, value))

    def total(self, of: Callable[[Key], bool] = lambda _: True) -> Durations:
        """Of all calls whose op, backend and path are `of` interest."""
        found = Durations()
        for key, durations in self.calls.items():
            if of(key):
                found.add(durations)
        return found

    def shortened(self, most: int) -> Sample:
        """The same with at most so many rows of a kind, those with most calls; the others together are `other`."""
        found = Sample(self.seconds, queued=self.queued, workers=self.workers, gauges=self.gauges)
        for key in sorted(self.calls, key=lambda key: -self.calls[key].count):
            kept = key if len(found.calls) < most else (OTHER,) * len(key)
            found.calls.setdefault(kept, Durations()).add(self.calls[key])
        found.queued = dict(sorted(self.queued.items(), key=lambda row: -row[1].count)[:most])
        for name in ("errors", "fallbacks", "restarts"):
            counts: dict[Key, int] = {}
            for key, count in sorted(getattr(self, name).items(), key=lambda row: -row[1]):
                kept = key if len(counts) < most else (OTHER,) * len(key)
                counts[kept] = counts.get(kept, 0) + count
            setattr(found, name, counts)
        found.workers = dict(sorted(self.workers.items(), key=lambda row: not row[1].running)[: 4 * most])
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is empty is left out."""
        lists: dict[str, Any] = {
            name: [[*key, d.count, d.sum_ns, sorted(d.buckets.items())] for key, d in getattr(self, name).items()]
            for name in ("calls", "queued")
        }
        for name in ("errors", "fallbacks", "restarts"):
            lists[name] = [[*key, count] for key, count in getattr(self, name).items()]
        lists["workers"] = [
            [name, one.state, one.running, one.waiting, one.enqueued, one.memory_bytes, one.gpu_bytes]
            for name, one in self.workers.items()
        ]
        return {
            "seconds": round(self.seconds, 3),
            "gauges": self.gauges,
            **{n: rows for n, rows in lists.items() if rows},
        }

    @classmethod
    def from_dict(cls, value: Any) -> Sample:
        """What `to_dict` made, which may be anybody's: raises ValueError, TypeError, KeyError for what it never is."""
        found = cls(_number(value["seconds"]), gauges={str(k): _number(v) for k, v in value["gauges"].items()})
        for name, labels in (("calls", 3), ("queued", 1)):
            for *key, count, sum_ns, buckets in value.get(name, ()):
                durations = Durations(_count(count), _count(sum_ns), {_bucket(n): _count(c) for n, c in buckets})
                getattr(found, name)[_key(key, labels)] = durations
        for name, labels in (("errors", 3), ("fallbacks", 3), ("restarts", 2)):
            for *key, count in value.get(name, ()):
                getattr(found, name)[_key(key, labels)] = _count(count)
        for name, state, *numbers in value.get("workers", ()):
            found.workers[str(name)] = Worker(str(state), *map(_count, numbers))
        return found


def _key(key: Sequence[Any], labels: int) -> Key:
    if len(key) != labels or not all(isinstance(one, str) for one in key):
        raise ValueError(f"{key!r:.80} are no labels")
    return tuple(key)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _bucket(value: Any) -> int:
    if type(value) is not int or not 0 <= value < BUCKETS:
        raise ValueError(f"{value!r:.40} is no bucket")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is no number")
    return float(value)


def between(
    before: Mapping[str, Any], after: Mapping[str, Any], memory: Mapping[str, int], gpu: Mapping[str, int] | None = None
) -> Sample:
    """What happened between two answers of one broker, or since it began where `before` is of another or is empty.
    `memory`: bytes of each backend's worker; `gpu`: those on GPUs."""
    if before and after["up_s"] < before["up_s"]:
        before = {}
    found = Sample(after["up_s"] - (before["up_s"] if before else 0.0))
    for name, into in (("durations", found.calls), ("queued", found.queued)):
        earlier = {tuple(key): (buckets, sum_ns) for *key, buckets, sum_ns in before.get(name, ())}
        for *key, buckets, sum_ns in after[name]:
            old, old_ns = earlier.get(tuple(key), ((0,) * len(buckets), 0))
            if buckets == old:
                continue
            grown = {n: new - was for n, (new, was) in enumerate(zip(buckets, old, strict=True)) if new > was}
            if grown:
                into[tuple(key)] = Durations(sum(grown.values()), max(sum_ns - old_ns, 0), grown)
    for name, counts in (("errors", found.errors), ("fallbacks", found.fallbacks), ("restarts", found.restarts)):
        counts.update(_grown(before.get(name, ()), after[name]))
    for backend, state, running, waiting, enqueued in after["workers"]:
        if state not in UNSEEN:
            found.workers[backend] = Worker(
                state, running, waiting, enqueued, memory.get(backend, 0), (gpu or {}).get(backend, 0)
            )
    found.gauges = {name: float(after[name]) for name in GAUGES if name in after}
    found.gauges |= {f"{kind}_bytes": float(nbytes) for kind, nbytes in after["arena_bytes"].items()}
    return found


def _grown(before: Iterable[Sequence[Any]], after: Iterable[Sequence[Any]]) -> dict[Key, int]:
    earlier: defaultdict[Key, int] = defaultdict(int, {tuple(key): count for *key, count in before})
    grown = {tuple(key): count - earlier[tuple(key)] for *key, count in after}
    return {key: count for key, count in grown.items() if count > 0}
