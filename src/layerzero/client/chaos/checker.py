"""Whether the history of a chaos run keeps the promises: it reads what was written, and runs nothing.

1. Each call ends exactly once; only a client that was killed may leave calls open.
2. Each OK is what the oracle says of that call's own inputs.
3. Each error has a type that a caller is promised, and a fault near it that explains it.
4. Nothing comes after the end, no end is later than MAX_S, nothing is left behind, and the faults were the seed's.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.client.chaos import history
from layerzero.client.chaos.schedule import Fault, schedule
from layerzero.client.chaos.work import WORKS, is_right
from layerzero.ipc.errors import InvalidArgument

PROMISED = {
    "BACKEND_ERROR",
    "DEADLINE",
    "BROKER_LOST",
    "CANCELLED",
    "NOT_CONNECTED",
    "NO_BACKEND",
    "POISON",
}
OF_WORKERS = {"BACKEND_ERROR", "DEADLINE", "NO_BACKEND", "POISON"}  # the others are of brokers and of clients alone
MAX_S = 120.0  # waiting for a library to load counts, too, which takes half a minute on a machine with more to do
AFTER_S = 10.0  # how long a fault explains errors after its end: a library takes seconds to load again
MAX_SHOWN = 20


@dataclass
class Verdict:
    """What a history shows. `violations` is empty when every promise was kept."""

    calls: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_backend: Counter[str] = field(default_factory=Counter)
    fallbacks: int = 0
    open_at_kill: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lost_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    ok_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def violate(self, rule: str, text: str) -> None:
        self.counts[rule] += 1
        if self.counts[rule] <= MAX_SHOWN:
            self.violations.append(f"{rule}: {text}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "outcomes": dict(self.outcomes),
            "by_backend": dict(self.by_backend),
            "fallbacks": self.fallbacks,
            "open_at_kill": self.open_at_kill,
            "faults": dict(self.faults),
            "ok_s": _quantiles(self.ok_s),
            "broker_lost_s": _quantiles(self.lost_s),
            "broker_back_s": _quantiles(self.back_s),
            "violation_counts": dict(self.counts),
            "violations": self.violations,
        }


def check(folder: Path) -> Verdict:
    """Verify the history in a folder. Raises InvalidArgument when there is none, or it is none of ours."""
    try:
        facts = json.loads((folder / history.FACTS).read_bytes())
        struck = list(history.read(folder / history.FAULTS))
    except (OSError, ValueError) as exc:
        raise InvalidArgument(f"no history of a finished run in {folder}: {exc}") from exc
    verdict = Verdict()
    for text in facts["left_behind"]:
        verdict.violate("left behind", text)
    for text in facts["ended_badly"]:
        verdict.violate("ended badly", text)
    _check_schedule(facts, struck, verdict)
    faults = _Faults(struck)
    kills = [f["at"] for f in struck if (f["role"], f["kind"], f["result"]) == ("broker", "kill", "done")]
    files = list(history.clients_of(folder))
    if {number for number, _, _ in files} != set(range(facts["clients"])):
        verdict.violate("lost", f"{facts['clients']} clients ran; there are histories of {len(files)} processes")
    for number, incarnation, path in files:
        _Client(number, incarnation, faults, kills, verdict).check(history.read(path), facts["end_s"])
    return verdict


def _check_schedule(facts: dict[str, Any], struck: Sequence[dict[str, Any]], verdict: Verdict) -> None:
    backends = sorted({name for names in facts["ops"].values() for name in names})
    planned = schedule(
        facts["seed"], facts["duration_s"], gap_s=facts["gap_s"], backends=backends, clients=facts["clients"]
    )
    done = [Fault(*(fault[name] for name in Fault.__slots__)) for fault in struck]
    if list(planned) != done:
        verdict.violate("schedule", f"{len(done)} faults struck, which are not the {len(planned)} of the seed")
    for fault in struck:
        verdict.faults[f"{fault['role']} {fault['kind']}: {fault['result']}"] += 1


class _Faults:
    """When what was broken, in order."""

    def __init__(self, struck: Iterable[dict[str, Any]]) -> None:
        self._done = [fault for fault in struck if fault["result"] == "done"]
        self.killed = {(int(f["target"]), f["incarnation"]) for f in self._done if self._is(f, "client", "kill")}

    @staticmethod
    def _is(fault: dict[str, Any], role: str, kind: str) -> bool:
        return bool(fault["role"] == role and fault["kind"] == kind)

    def explain(self, outcome: str, backend: str | None, client: int, begin_s: float, end_s: float) -> bool:
        """Whether a fault that struck what the call needed can have led to its outcome."""
        for fault in self._done:
            if fault["at"] > end_s or fault["at"] + fault["lasts_s"] + AFTER_S < begin_s:
                continue
            is_own = fault["role"] == "client" and int(fault["target"]) == client
            is_near = fault["role"] == "worker" and backend in (None, fault["target"])
            if is_own or fault["role"] == "broker" or (is_near and outcome in OF_WORKERS):
                return True
        return False


class _Client:
    """One client process's lines, in its order."""

    def __init__(
        self, number: int, incarnation: int, faults: _Faults, kills: Sequence[float], verdict: Verdict
    ) -> None:
        self._name = f"client {number}.{incarnation}"
        self._number, self._incarnation = number, incarnation
        self._faults, self._kills, self._verdict = faults, kills, verdict
        self._open: dict[int, dict[str, Any]] = {}
        self._ended: set[int] = set()
        self._lost_since_s: float | None = None

    def check(self, lines: Iterable[dict[str, Any]], end_s: float) -> None:
        verdict, last_s, has_ended = self._verdict, 0.0, False
        for line in lines:
            at_s = line["end"] if "end" in line else line["at"]
            if has_ended or at_s > end_s:
                verdict.violate("after the end", f"{self._name}: {line}")
            last_s = max(last_s, at_s)
            if line.get("did") == "end":
                has_ended = True
                if line["calls"] != len(self._ended):
                    verdict.violate("lost", f"{self._name} made {line['calls']} calls; {len(self._ended)} have ended")
            elif "end" in line:
                self._end(line)
            elif "call" in line:
                self._begin(line)
        is_killed = (self._number, self._incarnation) in self._faults.killed
        if is_killed:
            verdict.open_at_kill += len(self._open)
        elif not has_ended:
            verdict.violate("ended badly", f"{self._name} wrote no end, and was not killed")
        elif self._open:
            verdict.violate("lost", f"{self._name}: calls {list(self._open)[:10]} never ended")

    def _begin(self, line: dict[str, Any]) -> None:
        if line["call"] in self._open or line["call"] in self._ended:
            self._verdict.violate("duplicate", f"{self._name}: call {line['call']} was made twice")
        self._open[line["call"]] = line
        self._verdict.calls += 1

    def _end(self, line: dict[str, Any]) -> None:
        verdict = self._verdict
        begun = self._open.pop(line["call"], None)
        if begun is None:
            word = "again" if line["call"] in self._ended else "without having begun"
            verdict.violate("duplicate", f"{self._name}: call {line['call']} ended {word}: {line}")
            return
        self._ended.add(line["call"])
        outcome, took_s = line["outcome"], line["end"] - begun["at"]
        verdict.outcomes[outcome] += 1
        what = f"{self._name}: {begun} {line}"
        if took_s > MAX_S:
            verdict.violate("late", f"{took_s:.1f} s: {what}")
        if outcome == "OK":
            self._end_ok(begun, line, what)
        elif outcome not in PROMISED:
            verdict.violate("not a promised error", what)
        elif not self._faults.explain(outcome, begun.get("backend"), self._number, begun["at"], line["end"]):
            verdict.violate("unexplained", what)
        if outcome == "BROKER_LOST":
            self._note_loss(begun["at"], line["end"])

    def _end_ok(self, begun: dict[str, Any], line: dict[str, Any], what: str) -> None:
        verdict = self._verdict
        if not is_right(line["got"], WORKS[begun["op"]].expected(begun["nonce"])):
            verdict.violate("wrong", what)
        verdict.by_backend[line["by"]] += 1
        verdict.fallbacks += line["attempts"] > 1
        if begun["alone"]:
            verdict.ok_s.append(line["end"] - begun["at"])
        if begun.get("backend") not in (None, line["by"]):
            verdict.violate("not where it was pinned", what)
        if self._lost_since_s is not None and begun["at"] > self._lost_since_s:
            verdict.back_s.append(line["end"] - self._lost_since_s)
            self._lost_since_s = None

    def _note_loss(self, begin_s: float, end_s: float) -> None:
        """How long after the broker was killed, of calls that were open then."""
        first, last = bisect_left(self._kills, begin_s), bisect_right(self._kills, end_s)
        if last > first:
            self._verdict.lost_s.append(end_s - self._kills[first])
            if self._lost_since_s is None:
                self._lost_since_s = self._kills[first]


def _quantiles(values: list[float]) -> dict[str, float | int]:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    shown = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    places = {name: min(int(part * len(ordered)), len(ordered) - 1) for name, part in shown.items()}
    return {"count": len(ordered)} | {name: round(ordered[place], 6) for name, place in places.items()}
