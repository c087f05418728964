"""Which faults strike when: a function of the seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.errors import InvalidArgument

START_S = 1.0  # quiet at the start
END_S = 2.0  # and at the end, so that what is broken last is seen to recover
# role -> kind -> how many cards of it are in the deck. A deck is dealt to the end before the next is shuffled: short
# runs see each fault, too.
DECK: dict[str, dict[str, int]] = {
    "worker": {"kill": 3, "segv": 2, "abort": 1, "stop": 2, "slow": 2, "disconnect": 2},
    "client": {"kill": 2, "stop": 1, "slow": 1, "disconnect": 1, "leave": 2},
    "broker": {"kill": 1, "stop": 1, "slow": 1},
}
LASTING = {"stop": (0.2, 4.5), "slow": (0.5, 3.0)}  # seconds, of kinds that last


@dataclass(frozen=True, slots=True)
class Fault:
    """One strike. `target`: a backend, a client's number, or "" for the broker; `lasts_s`: 0 when it is a moment."""

    at_s: float
    role: str
    kind: str
    target: str
    lasts_s: float

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("at_s", "role", "kind", "target", "lasts_s")}


def schedule(seed: int, duration_s: float, *, gap_s: float, backends: Sequence[str], clients: int) -> tuple[Fault, ...]:
    """The faults of a run, in order. `gap_s`: mean time between two. Raises InvalidArgument for a run without room."""
    if duration_s <= START_S + END_S:
        text = f"{duration_s:g} s of chaos are too few; a run is quiet for {START_S + END_S:g} s at its start and end"
        raise InvalidArgument(text)
    if gap_s <= 0 or clients < 1 or not backends:
        raise InvalidArgument(f"gap_s={gap_s:g}, clients={clients}, backends={list(backends)}; allowed: more than none")
    rng = random.Random(f"schedule {seed}")
    targets = {"worker": sorted(backends), "client": [str(n) for n in range(clients)], "broker": [""]}
    faults: list[Fault] = []
    deck: list[tuple[str, str]] = []
    at_s = START_S
    while (at_s := at_s + rng.uniform(0.4, 1.6) * gap_s) < duration_s - END_S:
        if not deck:
            deck = [(role, kind) for role, kinds in DECK.items() for kind, count in kinds.items() for _ in range(count)]
            rng.shuffle(deck)
        role, kind = deck.pop()
        target = rng.choice(targets[role])
        lasts_s = rng.uniform(*LASTING[kind]) if kind in LASTING else 0.0
        faults.append(Fault(round(at_s, 4), role, kind, target, round(lasts_s, 4)))
    return tuple(faults)
