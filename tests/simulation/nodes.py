"""A seeded cluster around the decisions about other nodes (cluster/calls/placement.py), on a simulated clock.

`run(seed)` has every node make calls, 100,000 a second together, as session.py has a program make them: here, by other
nodes that are asked and priced, on to the next one when a node is lost. Nodes die in the middle of calls and join; Ray
notices late; workers die of some calls. Violation, with the seed, where a promise is broken:

- a call that a node can serve which stays is answered, and every call ends once;
- a node is tried once by a call, and never after its loss was noticed: while it is away, or once Ray has told it;
- a call kills two workers at most;
- what few nodes serve is spread over them, while few of them die.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from layerzero.client.connection.report import Candidate
from layerzero.cluster.calls import placement
from layerzero.cluster.calls.placement import Choice, Decisions, Nodes, Walk
from layerzero.cluster.calls.price import Way, is_cheaper, priced

FEW, SLOW, FAST, DEADLY = b"few", b"slow", b"fast", b"deadly"
SHARES = {FAST: 0.7, FEW: 0.2, SLOW: 0.099, DEADLY: 0.001}  # of calls
HAVE_FEW = 0.04  # share of nodes
COARSE_US = 3_000.0
KNOWN_S = 10.0  # as others.py: so old may be what is known of which nodes there are
NOTICE_S = (0.001, 0.05)  # until a call hears that its node is lost
RAY_S = 0.2  # until Ray tells it
JOIN_S = 0.05
FEW_DEATHS = 0.05  # of nodes: else those that stay serve more than those that came
SPREAD, ENOUGH = 3.0, 20  # no node has so many times its share of what few serve, where a share is enough to tell


class Violation(AssertionError):
    """A broken promise."""


@dataclass(eq=False)
class Node:
    """A machine, its broker, and a program on it that makes calls."""

    name: str
    kernels: dict[bytes, float]  # us
    nodes: Nodes
    decisions: Decisions
    is_alive: bool = True
    served: Counter[bytes] = field(default_factory=Counter)
    away_until_s: dict[str, float] = field(default_factory=dict)  # what its program was told, by the world's own notes
    told_gone: set[str] = field(default_factory=set)
    looked_s: float = -KNOWN_S


@dataclass(eq=False)
class Trip:
    """One call. `walk`: over nodes, None while it is served here."""

    client: Node
    kind: bytes
    walk: Walk | None = None
    is_decided: bool = False
    tried: set[str] = field(default_factory=set)
    has_lost: bool = False  # a node since others were asked
    deaths: int = 0
    ends: int = 0


class World:
    def __init__(self, seed: int, nodes: int, parts: Mapping[type, type]) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._parts = parts
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.nodes: dict[str, Node] = {}
        self.known: set[str] = set()  # to Ray
        self.ends: Counter[str] = Counter()
        self._names: list[str] = []
        for _ in range(nodes):
            self._join()

    def run(self, seconds: float, calls_a_s: int, deaths_a_s: int) -> Counter[str]:
        """What became of calls."""
        kinds = self.random.choices(list(SHARES), list(SHARES.values()), k=int(calls_a_s * seconds))
        for number, kind in enumerate(kinds):
            self._at(number / calls_a_s, self._call, kind)
        for _ in range(int(deaths_a_s * seconds)):
            self._at(self.random.uniform(0, seconds), self._die)
        while self._events:
            self.now_s, _, act, args = heapq.heappop(self._events)
            act(*args)
        if deaths_a_s * seconds < FEW_DEATHS * len(self.nodes):
            self._check_spread()
        return self.ends

    def _at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), act, args))

    def _join(self) -> None:
        name = f"{self.random.getrandbits(224):056x}"
        kernels = {FAST: 50.0, SLOW: self.random.choice([2_000.0, 20_000.0]), DEADLY: 2_000.0}
        if not self.nodes or self.random.random() < HAVE_FEW:  # one at least
            kernels[FEW] = self.random.uniform(900, 1_000)
        if self.random.random() < 0.5:
            del kernels[DEADLY]
        made = self._parts.get(Nodes, Nodes)(name)
        self.nodes[name] = Node(name, kernels, made, Decisions())
        self.known.add(name)
        self._names.append(name)

    # --- deaths

    def _die(self) -> None:
        """Of any node but the first, which can serve all."""
        few = [name for name in self._names[1:] if FEW in self.nodes[name].kernels]
        victim = self.nodes[self.random.choice(few if few and self.random.random() < 0.3 else self._names[1:])]
        if not victim.is_alive:
            return
        victim.is_alive = False
        self._at(self.now_s + RAY_S, self.known.discard, victim.name)
        self._at(self.now_s + JOIN_S, self._join)

    def _lost(self, trip: Trip, node: str) -> None:
        """The call hears that this node does not answer."""
        client = trip.client
        trip.has_lost = True
        client.nodes.lose(node, self.now_s)
        client.away_until_s[node] = self.now_s + placement.AWAY_S
        client.looked_s = -KNOWN_S
        self._go_on(trip)

    # --- a call, as session.py makes it

    def _call(self, kind: bytes) -> None:
        client = self.nodes[self.random.choice(self._names)]
        if not client.is_alive:
            return
        trip = Trip(client, kind)
        decision = client.decisions.elsewhere(kind, self.now_s)
        if decision is None:
            self._here(trip)
            return
        trip.is_decided = True
        self._walk(trip, decision.choices, next(decision.turns))

    def _here(self, trip: Trip) -> None:
        client, kind = trip.client, trip.kind
        us = client.kernels.get(kind)
        if kind == DEADLY and us is not None:
            trip.deaths += 1
            us = None
        if us is None:
            self._elsewhere(trip)
            return
        self._end(trip, "here")
        if us > COARSE_US and not client.decisions.stays(kind, self.now_s):
            cheaper = [one for one in self._asked(client, kind, us) if is_cheaper(one.price_us, us)]
            client.decisions.decide(kind, cheaper, (), self.now_s)

    def _elsewhere(self, trip: Trip) -> None:
        trip.has_lost = False
        choices = self._asked(trip.client, trip.kind, None)
        if choices and trip.kind != DEADLY:
            trip.client.decisions.decide(trip.kind, choices, (), self.now_s)
        self._walk(trip, placement.by_price(choices))

    def _asked(self, client: Node, kind: bytes, here_us: float | None) -> list[Choice]:
        if self.now_s - client.looked_s >= KNOWN_S:
            client.looked_s = self.now_s
            client.nodes.see(self.known)
            client.told_gone = {name for name in self._names if name not in self.known}
        found = []
        for asked in client.nodes.rounds(self.now_s):
            for name in asked:
                node = self.nodes[name]
                if not node.is_alive:
                    client.nodes.lose(name, self.now_s)
                    client.away_until_s[name] = self.now_s + placement.AWAY_S
                elif kind in node.kernels:
                    row = Candidate(kind.decode(), "any", True, score=1.0, measured_us=node.kernels[kind])
                    found.append(Choice(name, priced(row, name[:12], Way(1_000.0, 1e9), 10_000, here_us, 1.0)))
            if found:
                break
        return found

    def _walk(self, trip: Trip, choices: tuple[Choice, ...], turn: int = 0) -> None:
        trip.walk = self._parts.get(Walk, Walk)(choices, trip.client.nodes, turn)
        trip.tried = set()
        self._go_on(trip)

    def _go_on(self, trip: Trip) -> None:
        assert trip.walk is not None
        if self._is_poisonous(trip):
            self._end(trip, "poison")
            return
        one = trip.walk.next(self.now_s)
        if one is not None:
            self._check_choice(trip, one.node)
            trip.tried.add(one.node)
            self._at(self.now_s + 0.0005, self._arrive, trip, one.node)
        elif trip.is_decided:
            trip.is_decided = False
            trip.client.decisions.forget(trip.kind)
            self._here(trip)
        elif trip.has_lost:
            self._elsewhere(trip)
        elif trip.kind == DEADLY:
            self._end(trip, "nobody")
        else:
            raise Violation("a call is lost that a node could serve")

    def _is_poisonous(self, trip: Trip) -> bool:
        found: bool = self._parts.get(placement.is_poisonous, placement.is_poisonous)(trip.deaths)  # type: ignore[call-overload]
        return found

    def _arrive(self, trip: Trip, name: str) -> None:
        node = self.nodes[name]
        if not node.is_alive:
            self._at(self.now_s + self.random.uniform(*NOTICE_S), self._lost, trip, name)
            return
        self._at(self.now_s + node.kernels[trip.kind] / 1e6, self._ran, trip, node)

    def _ran(self, trip: Trip, node: Node) -> None:
        if not node.is_alive:  # in the middle of it, or before its answer was on its way
            self._at(self.now_s + self.random.uniform(*NOTICE_S), self._lost, trip, node.name)
        elif trip.kind == DEADLY:
            trip.deaths += 1
            self._go_on(trip)
        else:
            node.served[trip.kind] += 1
            self._at(self.now_s + 0.0005, self._end, trip, "elsewhere")

    def _end(self, trip: Trip, how: str) -> None:
        trip.ends += 1
        if trip.ends > 1:
            raise Violation("a call is answered twice")
        if trip.deaths > placement.DEATHS:
            raise Violation(f"a call killed {trip.deaths} workers")
        self.ends[how] += 1

    # --- promises

    def _check_choice(self, trip: Trip, name: str) -> None:
        if name in trip.tried:
            raise Violation("a call tries a node twice")
        if trip.client.away_until_s.get(name, 0.0) > self.now_s or name in trip.client.told_gone:
            raise Violation("a node is tried whose loss was noticed")

    def _check_spread(self) -> None:
        served = [node.served[FEW] for node in self.nodes.values() if FEW in node.kernels and node.is_alive]
        share = sum(served) / len(served)
        if share >= ENOUGH and max(served) > SPREAD * share:
            raise Violation(f"one node served {max(served)} calls of {share:.0f} that were its share")


def run(
    seed: int,
    *,
    nodes: int = 1_000,
    seconds: float = 1.0,
    calls_a_s: int = 100_000,
    deaths_a_s: int = 60,
    parts: Mapping[Any, Any] | None = None,
) -> Counter[str]:
    """Raises Violation, with the seed."""
    try:
        return World(seed, nodes, parts or {}).run(seconds, calls_a_s, deaths_a_s)
    except Violation as exc:
        raise Violation(f"seed {seed}: {exc}") from None
