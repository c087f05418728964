"""Times as people write them, and rows of a Sample as tables show them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import NamedTuple

from layerzero.client.history.sample import Durations, Sample
from layerzero.ipc.errors import InvalidArgument

_CLOCK = re.compile(r"(?:(\d{4})-(\d\d)-(\d\d)[ T])?(\d{1,2}):(\d\d)(?::(\d\d))?")
_AGO = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|d)(?: ago)?")
UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds(text: str) -> float:
    """Of `90s`, `15min`, `2h`, `7d`. Raises InvalidArgument."""
    found = _AGO.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise InvalidArgument(f"give a time span such as 90s, 15min, 2h or 7d; got {text!r:.40}")
    return float(found[1]) * UNITS_S[found[2]]


def moment(text: str, now: float) -> float:
    """Seconds since 1970 of `14:02`, the last time that the clock here showed that before `now`; of `2026-11-27 14:02`,
    or of a span such as `15min`, so long ago. Raises InvalidArgument."""
    if (found := _CLOCK.fullmatch(text.strip())) is None:
        try:
            return now - seconds(text)
        except InvalidArgument:
            raise InvalidArgument(
                f"give a time such as 14:02, 14:02:30, '2026-11-27 14:02' or 15min ago; got {text!r:.40}"
            ) from None
    year, month, day, hour, minute, second = found.groups()
    today = datetime.fromtimestamp(now)
    date = (today.year, today.month, today.day) if year is None else (int(year), int(month), int(day))
    try:
        at = datetime(*date, int(hour), int(minute), int(second or 0))
    except ValueError as exc:
        raise InvalidArgument(f"give a date and a time of day that there are; got {text!r:.40}: {exc}") from exc
    if year is None and at > today:
        at -= timedelta(days=1)
    return at.timestamp()


class BackendRow(NamedTuple):
    """What a backend did in a Sample. `rate`: calls a second; `p50_us`, `p99_us`: None without calls."""

    name: str
    state: str
    rate: float
    p50_us: float | None
    p99_us: float | None
    running: int
    waiting: int
    fallbacks: int
    restarts: int
    memory_bytes: int
    gpu_bytes: int


def backend_rows(sample: Sample) -> list[BackendRow]:
    """By name; of backends with a worker, and of those that had calls."""
    its: dict[str, Durations] = {}
    for (_, backend, _), durations in sample.calls.items():
        its.setdefault(backend, Durations()).add(durations)
    rows = []
    for name in sorted({*sample.workers, *its}):
        worker, durations = sample.workers.get(name), its.get(name, Durations())
        rows.append(
            BackendRow(
                name,
                "absent" if worker is None else "busy" if worker.is_busy else worker.state,
                durations.count / max(sample.seconds, 1e-3),
                durations.quantile_us(0.5),
                durations.quantile_us(0.99),
                0 if worker is None else worker.running,
                0 if worker is None else worker.waiting + worker.enqueued,
                sum(count for (_, backend, _), count in sample.fallbacks.items() if backend == name),
                sum(count for (backend, _), count in sample.restarts.items() if backend == name),
                0 if worker is None else worker.memory_bytes,
                0 if worker is None else worker.gpu_bytes,
            )
        )
    return rows


class OpRow(NamedTuple):
    """What calls of an op at a backend, by a path, took in a Sample."""

    op: str
    backend: str
    path: str
    rate: float
    p50_us: float | None
    p99_us: float | None


def op_rows(sample: Sample) -> list[OpRow]:
    """Those with most calls first."""
    found = sorted(sample.calls.items(), key=lambda row: (-row[1].count, row[0]))
    return [
        OpRow(op, backend, path, its.count / max(sample.seconds, 1e-3), its.quantile_us(0.5), its.quantile_us(0.99))
        for (op, backend, path), its in found
    ]


def time_text(us: float | None) -> str:
    """Of a duration: 12 us, 3.4 ms, 1.2 s."""
    if us is None:
        return ""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.1f} {unit}" if us < 100 * size else f"{us / size:,.0f} {unit}"
    return f"{us:.1f} us" if us < 10 else f"{us:.0f} us"


def bytes_text(nbytes: float) -> str:
    """Of memory: 15 MiB; empty for none."""
    return f"{nbytes / (1 << 20):,.0f} MiB" if nbytes else ""
