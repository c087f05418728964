"""Metrics of a broker in Prometheus' model, made of its answer to the question `metrics`. docs/metrics.md has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from layerzero.ipc.shm.counter_words import BUCKETS

BOUNDS = [*(f"{1e-6 * 2**n:.9g}" for n in range(BUCKETS - 1)), "+Inf"]  # seconds
STATES = ("absent", "probing", "starting", "ready", "killing", "backoff", "disabled", "stopping", "stopped")

COUNTS = (
    ("fallbacks", ("op", "backend", "reason"), "Attempts at a backend that failed, after which the call went on."),
    ("late_failures", ("op", "backend", "reason"), "Calls on a GPU that failed after they had been counted as ok."),
    ("rejections", ("op", "backend", "reason"), "Kernels that a ranking of candidates refused, by the first reason."),
    ("copied_bytes", ("op", "path"), "Bytes that clients copied, since arrays did not lie where workers reach them."),
    ("worker_restarts", ("backend", "cause"), "Workers that ended and were planned to start again."),
    ("compiles", ("backend", "outcome"), "Kernels compiled ahead of calls."),
    ("compile_seconds", ("backend",), "Seconds that compilations took which ended well."),
    ("shadow_mismatches", ("op", "backend"), "Shadow checks whose results differed by more than is allowed."),
)
"""Counters: name without prefix and suffix, labels, meaning."""
GAUGES = (
    ("up_seconds", "up_s", "How long the broker has been up."),
    ("clients", "clients", "Connected clients."),
    ("open_calls", "open_calls", "Calls that clients wait for, of those that the broker sees."),
    ("lanes", "lanes", "Express lanes and rings."),
    ("selection_epoch", "epoch", "Grows whenever kernels may be selected otherwise."),
    ("problems", "problems", "Problems that lz status lists."),
)
_KEYS = {
    "late_failures": "late",
    "copied_bytes": "copied",
    "worker_restarts": "restarts",
    "compile_seconds": "compile_s",
    "shadow_mismatches": "mismatches",
}


class Snapshot(Collector):
    """One answer of the broker. `gpu_bytes`: what its workers hold of GPUs' memory, by backend and UUID."""

    def __init__(self, answer: Mapping[str, Any], gpu_bytes: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self._answer = answer
        self._gpu_bytes = gpu_bytes or {}

    def collect(self) -> Iterator[Metric]:
        """Every family, also those without samples."""
        answer = self._answer
        yield InfoMetricFamily("layerzero", "The broker.", {"version": str(answer["version"])})
        for name, key, what in GAUGES:
            yield GaugeMetricFamily(f"layerzero_{name}", what, float(answer[key]))
        for name, key, what in (
            ("stale_answers", "stale", "Answers of workers that came too late to count."),
            ("refused_pages", "refused_pages", "Pages of counters whose words made no sense; they are read no more."),
        ):
            yield CounterMetricFamily(f"layerzero_{name}", what, float(answer[key]))
        yield self._calls()
        what = "How long calls took that ended well."
        yield Histogram("layerzero_call_duration_seconds", what, _CALLS, answer["durations"])
        what = "How long calls waited until they were sent to a worker."
        yield Histogram("layerzero_queue_seconds", what, ("op",), answer["queued"])
        for name, labels, what in COUNTS:
            family = CounterMetricFamily(f"layerzero_{name}", what, labels=labels)
            _fill(family, answer[_KEYS.get(name, name)])
            yield family
        arenas = GaugeMetricFamily("layerzero_arena_bytes", "Memory that clients lend.", labels=("kind",))
        _fill(arenas, answer["arena_bytes"].items())
        yield arenas
        gpu = GaugeMetricFamily(
            "layerzero_gpu_memory_bytes", "Memory of GPUs that workers hold, as the driver tells it.", labels=_ON_GPU
        )
        _fill(gpu, ((name, uuid, n) for name, its in self._gpu_bytes.items() for uuid, n in its.items()))
        yield gpu
        yield from self._workers()

    def _calls(self) -> Metric:
        calls = CounterMetricFamily("layerzero_calls", "Calls that ended, by outcome.", labels=_OUTCOMES)
        ok: Counter[tuple[str, str]] = Counter()
        for op, backend, _, buckets, _ in self._answer["durations"]:
            ok[op, backend] += sum(buckets)
        _fill(calls, ((op, backend, "ok", count) for (op, backend), count in ok.items()))
        _fill(calls, self._answer["errors"])
        return calls

    def _workers(self) -> Iterator[Metric]:
        workers = self._answer["workers"]
        states = GaugeMetricFamily(
            "layerzero_worker_state", "1 for the state that it is in.", labels=("backend", "state")
        )
        for backend, state, *_ in workers:
            for one in STATES:
                states.add_metric((backend, one), float(one == state))
        yield states
        calls = GaugeMetricFamily("layerzero_worker_calls", "Calls at workers.", labels=("backend", "where"))
        for backend, _, *sizes in workers:
            for where, size in zip(("running", "waiting", "enqueued"), sizes, strict=True):
                if size:
                    calls.add_metric((backend, where), float(size))
        yield calls


_ON_GPU = ("backend", "gpu")
_CALLS, _OUTCOMES = ("op", "backend", "path"), ("op", "backend", "outcome")


class Histogram(Metric):
    """A histogram of seconds, whose samples are made when somebody asks for them, since most series are theirs. `rows`:
    values of `labels`, then the counts of its buckets, each of those up to its bound, and the sum."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        super().__init__(name, documentation, "histogram")
        self.labels = labels
        self.rows = [(given, list(accumulate(map(float, counts))), sum_ns / 1e9) for *given, counts, sum_ns in rows]

    @property
    def samples(self) -> list[Sample]:
        family = HistogramMetricFamily(self.name, self.documentation, labels=self.labels)
        for given, counts, total in self.rows:
            family.add_metric(given, list(zip(BOUNDS, counts, strict=True)), total)
        return family.samples

    @samples.setter
    def samples(self, none: list[Sample]) -> None:
        """What any metric begins with."""


def _fill(family: CounterMetricFamily | GaugeMetricFamily, rows: Iterable[Sequence[Any]]) -> None:
    for *labels, value in rows:
        family.add_metric(labels, float(value))
