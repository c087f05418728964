"""Which backends fail at which ops: one circuit breaker per (backend, op, device), with one transition table.

CLOSED: calls go there. OPEN: none until `retry_at_s`. HALF_OPEN: one probe call may go; it decides.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

MAX_BREAKERS = 1024
MAX_SIGNATURES = 16  # kinds of failure remembered per breaker; the one seen longest ago is let go
MAX_SIGNATURE_CHARS = 160
FORGOTTEN = 0.01  # a closed breaker whose penalty is below this is as good as new
_VOLATILE = re.compile(r"0x[0-9a-fA-F]+|\d+")


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerSignal(Enum):
    FAILED = "failed"
    TRIPPED = "tripped"  # this failure was one too many
    SUCCEEDED = "succeeded"
    COOLED = "cooled"  # the back-off is over


_S, _G = BreakerState, BreakerSignal

TRANSITIONS: dict[tuple[BreakerState, BreakerSignal], BreakerState] = {
    (_S.CLOSED, _G.FAILED): _S.CLOSED,
    (_S.CLOSED, _G.TRIPPED): _S.OPEN,
    (_S.CLOSED, _G.SUCCEEDED): _S.CLOSED,
    (_S.OPEN, _G.FAILED): _S.OPEN,  # a call that was under way when it tripped
    (_S.OPEN, _G.SUCCEEDED): _S.OPEN,  # likewise: it proves nothing about calls to come
    (_S.OPEN, _G.COOLED): _S.HALF_OPEN,
    (_S.HALF_OPEN, _G.FAILED): _S.OPEN,
    (_S.HALF_OPEN, _G.SUCCEEDED): _S.CLOSED,
}


@dataclass(frozen=True)
class HealthLimits:
    """It trips at `failures` within `window_s` when they are at least `min_share` of the calls in between."""

    failures: int = 3
    window_s: float = 30.0
    min_share: float = 0.1
    backoff_s: float = 1.0  # doubles with each trip
    backoff_max_s: float = 120.0
    probe_s: float = 60.0  # a probe call that has not ended by then is given up, and another may go
    half_life_s: float = 60.0  # of the penalty


@dataclass(frozen=True, slots=True)
class HealthView:
    is_open: bool
    may_probe: bool
    retry_at_s: float  # when the next probe may go; 0.0 when closed
    penalty: float  # 0 (healthy) .. 1
    failures: int  # since it was last as good as new
    last_signature: str


HEALTHY = HealthView(False, False, 0.0, 0.0, 0, "")


def failure_signature(kind: str, detail: str = "") -> str:
    """What failures of one cause have in common: the kind and the first line, addresses and numbers blanked."""
    lines = detail.strip().splitlines()
    text = f"{kind}: {_VOLATILE.sub('#', lines[0].strip())}" if lines else kind
    return text[:MAX_SIGNATURE_CHARS]


@dataclass(slots=True)
class _Breaker:
    state: BreakerState = _S.CLOSED
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # (time, number of the call) of failures
    calls: int = 0
    trips: int = 0
    retry_at_s: float = 0.0
    failures: int = 0
    penalty: float = 0.0
    penalty_at_s: float = 0.0
    signatures: OrderedDict[str, int] = field(default_factory=OrderedDict)  # kind -> times, newest last

    def step(self, signal: BreakerSignal) -> None:
        self.state = TRANSITIONS[self.state, signal]

    def count(self, signature: str) -> None:
        """Remember a failure by its kind."""
        self.signatures[signature] = self.signatures.get(signature, 0) + 1
        self.signatures.move_to_end(signature)
        if len(self.signatures) > MAX_SIGNATURES:
            self.signatures.popitem(last=False)


class Health:
    """Breakers by (backend, op, device), made at the first failure and dropped when it is forgotten."""

    def __init__(self, limits: HealthLimits = HealthLimits()) -> None:
        self._limits = limits
        self._breakers: OrderedDict[tuple[str, str, str], _Breaker] = OrderedDict()
        self.epoch = 0  # grows whenever a breaker changes its state

    def failed(self, backend: str, op: str, device: str, signature: str, now_s: float) -> None:
        """A call raised, or died with its worker. Not for errors of the caller."""
        place = (backend, op, device)
        breaker = self._breakers.get(place)
        if breaker is None:
            breaker = self._breakers[place] = _Breaker()
            self._make_room()
        self._breakers.move_to_end(place)
        self._cool(breaker, now_s)
        breaker.calls += 1
        breaker.failures += 1
        breaker.penalty = (1.0 + self._penalty(breaker, now_s)) / 2
        breaker.penalty_at_s = now_s
        breaker.count(signature[:MAX_SIGNATURE_CHARS])
        if breaker.state is _S.CLOSED:
            breaker.recent.append((now_s, breaker.calls))
            if self._is_too_much(breaker, now_s):
                self._open(breaker, _G.TRIPPED, now_s)
        elif breaker.state is _S.HALF_OPEN:
            self._open(breaker, _G.FAILED, now_s)
        else:
            breaker.step(_G.FAILED)

    def succeeded(self, backend: str, op: str, device: str, now_s: float) -> None:
        """A call was answered."""
        place = (backend, op, device)
        breaker = self._breakers.get(place)
        if breaker is None:  # nearly always
            return
        self._cool(breaker, now_s)
        breaker.calls += 1
        was = breaker.state
        breaker.step(_G.SUCCEEDED)
        if was is not breaker.state:
            breaker.retry_at_s = 0.0
            self.epoch += 1
        if breaker.state is _S.CLOSED and self._penalty(breaker, now_s) < FORGOTTEN:
            del self._breakers[place]

    def view(self, backend: str, op: str, device: str, now_s: float) -> HealthView:
        """Changes nothing: whoever asks why a kernel is chosen must not change which one is."""
        breaker = self._breakers.get((backend, op, device))
        if breaker is None:
            return HEALTHY
        return HealthView(
            is_open=breaker.state is not _S.CLOSED,
            may_probe=breaker.state is not _S.CLOSED and now_s >= breaker.retry_at_s,
            retry_at_s=breaker.retry_at_s,
            penalty=self._penalty(breaker, now_s),
            failures=breaker.failures,
            last_signature=next(reversed(breaker.signatures), ""),
        )

    def reserve_probe(self, backend: str, op: str, device: str, now_s: float) -> bool:
        """Take the one probe call of a half-open breaker. False: another has it, or none is due."""
        breaker = self._breakers.get((backend, op, device))
        if breaker is None:
            return False
        self._cool(breaker, now_s)
        if breaker.state is not _S.HALF_OPEN or now_s < breaker.retry_at_s:
            return False
        breaker.retry_at_s = now_s + self._limits.probe_s
        return True

    def next_change_s(self, now_s: float) -> float:
        """When, after now, the next breaker may let a probe through; inf without one that waits for it."""
        waiting = (b.retry_at_s for b in self._breakers.values() if b.state is not _S.CLOSED)
        return min((at_s for at_s in waiting if at_s > now_s), default=math.inf)

    def reset(self, backend: str) -> None:
        """Someone repaired it: its breakers are as good as new."""
        for place in [p for p in self._breakers if p[0] == backend]:
            del self._breakers[place]
        self.epoch += 1

    def places(self) -> tuple[tuple[str, str, str], ...]:
        """(backend, op, device) of what has failed and is not forgotten."""
        return tuple(self._breakers)

    def signatures(self, backend: str, op: str, device: str) -> dict[str, int]:
        """Kinds of failure and how often each was seen, the newest last."""
        breaker = self._breakers.get((backend, op, device))
        return dict(breaker.signatures) if breaker else {}

    # --- one breaker

    def _cool(self, breaker: _Breaker, now_s: float) -> None:
        if breaker.state is _S.OPEN and now_s >= breaker.retry_at_s:
            breaker.step(_G.COOLED)
            self.epoch += 1

    def _is_too_much(self, breaker: _Breaker, now_s: float) -> bool:
        limits, recent = self._limits, breaker.recent
        while len(recent) > limits.failures:
            recent.popleft()
        first_s, first_call = recent[0]
        calls = breaker.calls - first_call + 1
        is_burst = len(recent) == limits.failures and now_s - first_s <= limits.window_s
        return is_burst and limits.failures >= limits.min_share * calls

    def _open(self, breaker: _Breaker, signal: BreakerSignal, now_s: float) -> None:
        breaker.step(signal)
        limits = self._limits
        breaker.retry_at_s = now_s + min(limits.backoff_s * 2.0 ** min(breaker.trips, 64), limits.backoff_max_s)
        breaker.trips += 1
        breaker.recent.clear()
        self.epoch += 1

    def _penalty(self, breaker: _Breaker, now_s: float) -> float:
        age_s = max(now_s - breaker.penalty_at_s, 0.0)
        return breaker.penalty * math.exp2(-age_s / self._limits.half_life_s)

    def _make_room(self) -> None:
        """The breaker that failed longest ago goes; it opens again with its next failures."""
        if len(self._breakers) > MAX_BREAKERS:
            self._breakers.popitem(last=False)
