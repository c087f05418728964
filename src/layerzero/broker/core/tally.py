"""Counts of what became of calls, attempts, workers and kernels, for metrics and `lz status`: numbers that only grow.

Calls that pass the broker by are counted by their clients, and come as what has grown on their pages of counters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from layerzero.broker.core.model import Call
from layerzero.ipc.errors import AdaptationRequired, Cancelled, DigestRequired, RunInProcess, WorkerUnreachable
from layerzero.ipc.shm.counter_words import BUCKETS, Growth, bucket_of

BROKER = "broker"  # the path of calls that are counted here
NOBODY = "none"  # in place of a backend, of a call that came to none
OTHER = "other"  # calls of a client that had no room to say more
# Answers after which the client makes the same call once more, or runs it itself.
STEPS = frozenset({AdaptationRequired.code, RunInProcess.code, DigestRequired.code, WorkerUnreachable.code})


@dataclass(slots=True)
class Durations:
    """`buckets` as of ipc/shm/counter_words.py."""

    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    sum_ns: int = 0

    def add(self, seconds: float) -> None:
        ns = max(int(1e9 * seconds), 0)
        self.buckets[bucket_of(ns)] += 1
        self.sum_ns += ns

    @property
    def count(self) -> int:
        return sum(self.buckets)


class Durably(dict[tuple[str, ...], Durations]):
    def __missing__(self, key: tuple[str, ...]) -> Durations:
        made = self[key] = Durations()
        return made


class Tally:
    """Keys are labels: ops, backends, paths and codes that this broker knows, nothing of a call's own."""

    def __init__(self) -> None:
        self.durations = Durably()  # of calls that ended well, by op, backend, path
        self.errors: Counter[tuple[str, str, str]] = Counter()  # of calls, by op, backend, code
        self.fallbacks: Counter[tuple[str, str, str]] = Counter()  # attempts that failed, by op, backend, code
        self.late: Counter[tuple[str, str, str]] = Counter()  # calls on GPUs that failed after they had counted as well
        self.rejections: Counter[tuple[str, str, str]] = Counter()  # in rankings, by op, backend, reason
        self.queued = Durably()  # until calls were first sent to a worker, by op
        self.copied: Counter[tuple[str, str]] = Counter()  # bytes that clients copied, by op and path
        self.restarts: Counter[tuple[str, str]] = Counter()  # by backend and cause
        self.compiles: Counter[tuple[str, str]] = Counter()  # by backend and outcome
        self.compile_s: defaultdict[str, float] = defaultdict(float)  # of those that ended well, by backend
        self.mismatches: Counter[tuple[str, str]] = Counter()  # shadow checks beyond what is allowed, by op, backend

    # --- calls that pass through the broker: each once

    def answer(self, call: Call, backend: str, now_s: float) -> None:
        """Its client hears that it has ended well; on a GPU, that it is enqueued."""
        if not call.is_counted:
            call.is_counted = True
            self.durations[call.route.signature.spec.op, backend, BROKER].add(now_s - call.arrived_s)

    def refuse(self, call: Call, code: str) -> None:
        """Its client hears that it has failed, or is to do the next step."""
        op, backend = call.route.signature.spec.op, call.attempts[-1]["backend"] if call.attempts else NOBODY
        if call.is_counted:
            self.late[op, backend, code] += 1
        elif code not in STEPS:
            self.errors[op, backend, code] += 1
        call.is_counted = True

    def refuse_early(self, op: str, code: str) -> None:
        """Of what never became a call."""
        if code not in STEPS:
            self.errors[op, NOBODY, code] += 1

    def close(self, call: Call) -> None:
        """Nothing is to be said of it any more: if nothing was, its client has left before."""
        if not call.is_counted:
            self.refuse(call, Cancelled.code)

    def send(self, call: Call, now_s: float) -> None:
        if call.attempt == 1 and not call.was_answered:
            self.queued[(call.route.signature.spec.op,)].add(now_s - call.arrived_s)

    # --- calls that do not

    def take(self, grown: list[tuple[str, Growth]]) -> None:
        """What pages of counters have grown by, each with the backend of its kernel."""
        for backend, one in grown:
            key = (one.label.op or OTHER, backend or OTHER, one.label.path or OTHER)
            if any(one.buckets):
                durations = self.durations[key]
                durations.buckets = [a + b for a, b in zip(durations.buckets, one.buckets, strict=True)]
            if one.sum_ns:
                self.durations[key].sum_ns += one.sum_ns
            if one.copied_bytes:
                self.copied[key[0], key[2]] += one.copied_bytes
            for code, count in one.errors.items():
                self.errors[key[0], key[1], code] += count
            for code, count in one.fallbacks.items():
                self.fallbacks[key[0], key[1], code] += count

    # --- for people

    def calls(self) -> list[dict[str, object]]:
        """By op, backend and path: how many ended well, and how long they took on average."""
        rows = sorted(self.durations.items())
        return [
            {
                "op": op,
                "backend": backend,
                "path": path,
                "calls": its.count,
                "mean_us": round(its.sum_ns / 1e3 / its.count, 1) if its.count else None,
            }
            for (op, backend, path), its in rows
        ]

    def facts(self) -> dict[str, list[dict[str, object]]]:
        """For `lz status`."""
        return {
            "calls": self.calls(),
            "errors": self.rows(self.errors),
            "fallbacks": self.rows(self.fallbacks),
            "copied_bytes": [
                {"op": op, "path": path, "bytes": nbytes} for (op, path), nbytes in sorted(self.copied.items())
            ],
            "restarts": [
                {"backend": backend, "cause": cause, "count": count}
                for (backend, cause), count in sorted(self.restarts.items())
                if count
            ],
        }

    @staticmethod
    def rows(counts: Counter[tuple[str, str, str]]) -> list[dict[str, object]]:
        """Of `errors`, `fallbacks`, `late` or `rejections`."""
        return [
            {"op": op, "backend": backend, "code": code, "count": count}
            for (op, backend, code), count in sorted(counts.items())
        ]
