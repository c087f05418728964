"""Evidence on a rollout: what the two versions did, and what its rules say of it. Counts and times in, a verdict out;
no clock, no I/O."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from layerzero.broker.selection.prices import TIE_US
from layerzero.broker.selection.rollout import PROMOTED, ROLLED_BACK, RUNNING, Rollout, pair_of
from layerzero.broker.selection.timings import PerfTable
from layerzero.ipc.wording import counted

MAX_TIMES = 512  # of one version on calls of one bucket: the newest
MAX_BUCKETS = 512  # whose times are kept; the one that was used longest ago goes first
MIN_TIMES = 20  # of either version, before they are compared
LOOK_EACH = 8  # new times
CHANCE = 1e-6  # what chance alone explains no better than this is no chance
MIN_CALLS = 20  # that the new version has served, before a step ends by time
MIN_COMPARED = 8  # comparisons, before a step with shadow checks ends


class Change(NamedTuple):
    """What becomes of a rollout: its next state, which is RUNNING for the next step."""

    state: str
    why: str


@dataclass(slots=True)
class Times:
    """Kernel times in microseconds on calls of one bucket."""

    new: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    old: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))

    @property
    def ratio(self) -> float:
        """Of the p99s; NaN while they are not compared."""
        if min(len(self.new), len(self.old)) < MIN_TIMES:
            return math.nan
        return percentile(self.new, 0.99) / max(percentile(self.old, 0.99), 1e-3)


@dataclass(slots=True)
class Pair:
    """Two kernels of one name. `errors`: calls that the new one failed and another kernel served."""

    new_calls: int = 0
    old_calls: int = 0
    errors: int = 0
    compared: int = 0
    mismatches: int = 0
    worst_error: float = 0.0


@dataclass(slots=True)
class Evidence:
    """Since the broker took the rollout up; `step_*` since its present step began. `express_*`: calls that did not pass
    through the broker, which is told how many there were and not of each. `deaths`: of the new version's worker."""

    rollout: Rollout
    step_since_s: float
    step_calls: int = 0
    step_compared: int = 0
    deaths: int = 0
    death: str = ""
    express_new: int = 0
    express_old: int = 0
    pairs: dict[str, Pair] = field(default_factory=dict)
    times: OrderedDict[tuple[str, str], Times] = field(default_factory=OrderedDict)
    change: Change | None = None  # that the rules ask for

    def begin_step(self, rollout: Rollout, now_s: float) -> None:
        self.rollout, self.step_since_s, self.step_calls, self.step_compared = rollout, now_s, 0, 0
        self.change = None

    # --- what happens

    def note_call(self, kernel_id: str, failed: Iterable[str], now_s: float) -> None:
        """A call that the rollout may be concerned with was served; `failed`: kernels that failed it before."""
        for kernel in failed:
            found = pair_of(self.rollout, kernel)
            if found is not None and found[1] and kernel != kernel_id:
                self._pair(found[0]).errors += 1
                self._judge_errors(f"{kernel} failed a call that {kernel_id} then served")
        found = pair_of(self.rollout, kernel_id)
        if found is None:
            return
        name, is_new = found
        if is_new:
            self._pair(name).new_calls += 1
            self.step_calls += 1
            self.look(now_s)
        else:
            self._pair(name).old_calls += 1

    def note_express(self, count: int, now_s: float, *, is_new: bool) -> None:
        if is_new:
            self.express_new += count
            self.step_calls += count
            self.look(now_s)
        else:
            self.express_old += count

    def note_death(self, why: str) -> None:
        """The new version's worker has ended by itself, or talked nonsense."""
        self.deaths, self.death = self.deaths + 1, why
        self._judge_errors(why)

    def note_compared(self, kernel_id: str, error: float, allowed: float, now_s: float, *, is_beyond: bool) -> None:
        """A call was served by one version and run again on the other. `error`, `allowed`: selection/shadow.py."""
        found = pair_of(self.rollout, kernel_id)
        if found is None:
            return
        pair = self._pair(found[0])
        pair.compared += 1
        self.step_compared += 1
        pair.worst_error = error if math.isnan(error) else max(pair.worst_error, error)
        pair.mismatches += is_beyond
        count, allowed_count = sum(p.mismatches for p in self.pairs.values()), self.rollout.rules.max_mismatches
        if count > allowed_count:
            text = f"{found[0]}: the results of the two versions differ by {error:.3g}, allowed {allowed:g}"
            self._roll_back(f"{counted(count, 'wrong result')}, allowed {allowed_count}: {text}")
        self.look(now_s)

    def note_time(self, kernel_id: str, bucket: str, us: float, before: PerfTable) -> None:
        """A kernel's time on a call of this bucket. `before`: those that the broker had without it."""
        found = pair_of(self.rollout, kernel_id)
        if found is None:
            return
        name, is_new = found
        times = self.times.get((name, bucket))
        if times is None:
            times = self.times[name, bucket] = Times()
            times.old.extend(before.samples(f"{self.rollout.backend}.{name}", bucket))
            if len(self.times) > MAX_BUCKETS:
                self.times.popitem(last=False)
        self.times.move_to_end((name, bucket))
        (times.new if is_new else times.old).append(us)
        if is_new and not len(times.new) % LOOK_EACH and is_slower(times.new, times.old, self.rollout.rules.max_p99):
            new, old = (percentile(one, 0.99) for one in (times.new, times.old))
            text = f"p99 of {new:,.1f} us, the old version's is {old:,.1f} us"
            self._roll_back(f"{bucket}: {text}; allowed {self.rollout.rules.max_p99:g} of that")

    # --- what the rules say

    @property
    def errors(self) -> int:
        return self.deaths + sum(pair.errors for pair in self.pairs.values())

    @property
    def compared(self) -> int:
        return sum(pair.compared for pair in self.pairs.values())

    def look(self, now_s: float) -> None:
        """Whether the step is over: all rules hold, after enough evidence."""
        if self.change is not None or self.lacks(now_s):
            return
        rollout = self.rollout
        served = f"{self.step_calls:,} calls"
        compared = f", {self.compared:,} comparisons" if rollout.shadow_rate else ", results not compared (no --shadow)"
        ratios = [times.ratio for times in self.times.values() if not math.isnan(times.ratio)]
        p99 = f", p99 at most {max(ratios):.2f} of the old" if ratios else ", p99 not compared: too few times of both"
        why = f"after {served}: {counted(self.errors, 'error')}{compared}{p99}"
        self.change = Change(RUNNING if rollout.step + 1 < len(rollout.shares) else PROMOTED, why)

    def lacks(self, now_s: float) -> str:
        """What the present step still waits for; empty for nothing."""
        rules, missing = self.rollout.rules, []
        least = rules.after_calls or MIN_CALLS
        if self.step_calls < least:
            missing.append(f"{self.step_calls:,} of {least:,} calls")
        if self.rollout.shadow_rate and self.step_compared < MIN_COMPARED:
            missing.append(f"{self.step_compared} of {MIN_COMPARED} comparisons")
        left_s = self.step_since_s + rules.after_s - now_s
        if rules.after_s and left_s > 0:
            missing.append(f"{left_s:,.0f} s more")
        return ", ".join(missing)

    @property
    def due_s(self) -> float:
        """When a step may end by time alone."""
        rules = self.rollout.rules
        return self.step_since_s + rules.after_s if rules.after_s else math.inf

    def facts(self, now_s: float) -> dict[str, Any]:
        """As plain values: what `lz rollout` shows."""
        return {
            "waits_for": self.lacks(now_s),
            "step_calls": self.step_calls,
            "deaths": self.deaths,
            "express_calls": {"new": self.express_new, "old": self.express_old},
            "pairs": [self._row(name, pair) for name, pair in sorted(self.pairs.items())],
        }

    def _row(self, name: str, pair: Pair) -> dict[str, Any]:
        """With the times of the bucket whose p99s are the furthest apart, or, where none is compared, the newest."""
        found = [(bucket, times) for (one, bucket), times in self.times.items() if one == name]
        found.sort(key=lambda one: -1.0 if math.isnan(one[1].ratio) else one[1].ratio)
        bucket, times = found[-1] if found else ("", Times())
        row: dict[str, Any] = {
            "kernel": name,
            "calls": {"new": pair.new_calls, "old": pair.old_calls},
            "errors": pair.errors,
            "compared": pair.compared,
            "mismatches": pair.mismatches,
            "worst_error": None if math.isnan(pair.worst_error) or not pair.compared else pair.worst_error,
            "bucket": bucket,
            "p99_ratio": None if math.isnan(times.ratio) else round(times.ratio, 3),
        }
        for side, samples in (("new", times.new), ("old", times.old)):
            p50, p99 = (round(percentile(samples, q), 3) if samples else None for q in (0.5, 0.99))
            row[side] = {"times": len(samples), "p50_us": p50, "p99_us": p99}
        return row

    def _judge_errors(self, why: str) -> None:
        allowed = self.rollout.rules.max_errors
        if self.errors > allowed:
            self._roll_back(f"{counted(self.errors, 'error')}, allowed {allowed}: {why}")

    def _roll_back(self, why: str) -> None:
        if self.change is None or self.change.state != ROLLED_BACK:
            self.change = Change(ROLLED_BACK, why)

    def _pair(self, name: str) -> Pair:
        return self.pairs.setdefault(name, Pair())


def percentile(samples: Iterable[float], q: float) -> float:
    """The least sample that is not below a share `q` of them."""
    ordered = sorted(samples)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]


def is_slower(new: Sequence[float], old: Sequence[float], ratio: float) -> bool:
    """Whether the p99 of `new` is above that of `old` by more than the ratio, and TIE_US: more of them take longer than
    that than chance explains, were p99 the same. Few samples of `old` say little of its slowest, and allow more."""
    if min(len(new), len(old)) < MIN_TIMES:
        return False
    p99 = percentile(old, 0.99)
    limit = max(ratio * p99, p99 + TIE_US)
    beyond = sum(us > limit for us in new)
    return beyond > 0 and _tail(len(new), beyond, max(0.01, 2.0 / (len(old) + 1))) < CHANCE


def _tail(count: int, least: int, chance: float) -> float:
    """That `least` of `count` or more are so, each by this chance."""
    return math.fsum(math.comb(count, k) * chance**k * (1.0 - chance) ** (count - k) for k in range(least, count + 1))
