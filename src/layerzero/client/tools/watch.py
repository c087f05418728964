"""The block of lz.compare: calls of a running program, run again on other backends, off the program's path."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from layerzero.client.facade import default_session
from layerzero.client.session.shadow import compare
from layerzero.client.session.watched import WatchedCall, takes
from layerzero.client.tools.compare_report import Compared, CompareReport
from layerzero.ipc.errors import BrokerLost, InvalidArgument, LayerZeroError, NotConnected
from layerzero.ipc.vocabulary.numerics import tolerance
from layerzero.ipc.vocabulary.shape_class import class_dtype, shape_class

BOTH = 2.0  # either may be off by the tolerance, in opposite directions
LEFT_S = 60.0  # so long the end of the block waits for calls that are still to be looked at
MAX_ROWS = 1000

Key = tuple[str, str, str, str, str, str]  # op, dtype, shape class, baseline, backend, kernel id


@dataclass
class _Row:
    allowed: float
    calls: int = 0
    error: float | None = None
    times: list[float] = field(default_factory=list)  # of the kernel, in microseconds; the first ones warm up
    baseline_times: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


class Comparison:
    """What `with lz.compare("torch@2.4") as c:` gives: from begin to end of the block, calls of this process's
    session are run again on each of the backends, in a thread, on copies of their inputs. `rate`: the share of them."""

    def __init__(self, backends: Sequence[str], rate: float = 1.0) -> None:
        if not (isinstance(rate, (int, float)) and 0 < rate <= 1):
            raise InvalidArgument(f"rate is {rate!r}; allowed: a share of calls above 0, up to 1")
        self.backends, self.rate = tuple(backends), float(rate)
        self._rows: dict[Key, _Row] = {}
        self._missed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_complete = True

    def __enter__(self) -> Comparison:
        self._is_complete = False
        default_session.session().shadow.watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_complete = default_session.session().shadow.unwatch(self, LEFT_S)

    def report(self) -> CompareReport:
        """What was found so far."""
        with self._lock:
            rows = [_compared(key, row) for key, row in sorted(self._rows.items())]
            return CompareReport(tuple(rows), dict(self._missed), self._is_complete)

    def miss(self, why: str) -> None:
        with self._lock:
            self._missed[why] += 1

    def look(self, call: WatchedCall) -> None:
        made = call.decision
        base_us: float | None = None
        for backend in self.backends:
            if backend == made.backend:
                continue
            kernel_id = next(
                (str(one["kernel_id"]) for one in made.candidates if one["backend"] == backend and takes(one)), ""
            )
            row = self._row(call, backend, kernel_id)
            if row is None:
                self.miss(f"more than {MAX_ROWS} kinds of calls")
            elif not kernel_id:
                self._fail(row, _why_not(call, backend))
            else:
                try:
                    if base_us is None:  # beside what it is compared with, and not while the program waits
                        base_us = call.run(made.backend, made.kernel_id)[1]
                    output, us = call.run(backend, kernel_id)
                except (BrokerLost, NotConnected):
                    raise
                except LayerZeroError as exc:
                    self._fail(row, f"{exc.code}: {' '.join(exc.message.split())[:200]}")
                    continue
                self._note(row, compare(output, call.output, call.spec, row.calls), us, base_us)

    def _row(self, call: WatchedCall, backend: str, kernel_id: str) -> _Row | None:
        plan = call.plan
        dtype = class_dtype(plan.op, plan.inputs)
        kind = shape_class(plan.op, plan.inputs, plan.attrs, plan.outputs)
        with self._lock:
            key = (plan.op, dtype, kind, call.decision.backend, backend, kernel_id)
            row = self._rows.get(key)
            if row is None and len(self._rows) < MAX_ROWS:
                allowed = BOTH * tolerance(dtype, plan.op, call.spec.dtype)
                row = self._rows[key] = _Row(allowed)
            return row

    def _fail(self, row: _Row, why: str) -> None:
        with self._lock:
            row.failures[why] += 1

    def _note(self, row: _Row, error: float, us: float, base_us: float) -> None:
        with self._lock:
            row.calls += 1
            row.error = error if row.error is None or not error <= row.error else row.error
            row.times += [us] if us else []
            row.baseline_times += [base_us] if base_us else []


def _why_not(call: WatchedCall, backend: str) -> str:
    """Why a backend takes no such call."""
    for one in call.decision.candidates:
        if one["backend"] == backend:
            codes = [reason["code"] for reason in one["reasons"]]
            return ", ".join(codes) if codes else f"needs copies: {', '.join(one['transforms'])}"
    return f"has no {call.plan.op}"


def _compared(key: Key, row: _Row) -> Compared:
    op, dtype, kind, baseline, backend, kernel_id = key
    return Compared(
        op,
        dtype,
        kind,
        baseline,
        backend,
        kernel_id,
        row.calls,
        row.error,
        row.allowed,
        _median(row.times),
        _median(row.baseline_times),
        dict(row.failures),
    )


def _median(times: Sequence[float]) -> float | None:
    """Without the first one, where there are others."""
    return statistics.median(times[1:] or times) if times else None
