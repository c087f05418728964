"""Which other nodes are asked about a call, which of them serve its kind, and what a lost node means. Pure: the time
comes as an argument, and Ray is not known here (tests/simulation/nodes.py)."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from layerzero.client.connection.report import Candidate

AWAY_S = 2.0  # so long a node is not asked after it was lost
FIRST_ASKED = 8  # nodes, about a call; where none of them serves it twice as many others, and so on
DECIDED_S = 30.0  # so long it holds where calls of a kind go
MAX_KINDS = 4096
ALIKE = 1.25  # nodes whose prices differ by less take turns
DEATHS = 2  # of workers, on all nodes together: as many as make a call poisonous on one


class Nodes:
    """The other nodes, by id, as one process knows them. `own`: the node that it is on."""

    def __init__(self, own: str) -> None:
        self.own = own
        self._seed = zlib.crc32(own.encode())
        self._order: list[str] = []
        self._there: set[str] = set()
        self._away_until_s: dict[str, float] = {}

    def see(self, alive: Collection[str]) -> None:
        """These are there now, of which some may be away."""
        new = set(alive) - {self.own}
        if new != self._there:
            self._order = sorted(new, key=self._rank)
            self._there = new
        self._away_until_s = {node: until_s for node, until_s in self._away_until_s.items() if node in alive}

    def _rank(self, node: str) -> tuple[int, str]:
        """An order that differs from node to node, so that not all ask the same ones. Mixed: by distance alone, of
        whatever kind, one that is far from others like it would get the calls of all between."""
        mixed = ((zlib.crc32(node.encode()) ^ self._seed) * 0x9E3779B1) & 0xFFFFFFFF
        return ((mixed ^ (mixed >> 15)) * 0x85EBCA77) & 0xFFFFFFFF, node

    def lose(self, node: str, now_s: float) -> None:
        """It did not answer."""
        self._away_until_s[node] = now_s + AWAY_S

    def may_try(self, node: str, now_s: float) -> bool:
        """Whether it is there, and was not lost a moment ago."""
        return node in self._there and self._away_until_s.get(node, 0.0) <= now_s

    def rounds(self, now_s: float) -> Iterator[list[str]]:
        """Whom to ask about a call, until one serves it: few first, all at last."""
        there = [node for node in self._order if self.may_try(node, now_s)]
        start, size = 0, FIRST_ASKED
        while start < len(there):
            yield there[start : start + size]
            start, size = start + size, 2 * size


@dataclass(frozen=True)
class Choice:
    """A kernel of another node. `candidate`: as a row of this node's report, whose `measured_us` is the price."""

    node: str
    candidate: Candidate

    @property
    def price_us(self) -> float:
        return self.candidate.measured_us or 0.0


@dataclass(frozen=True)
class Decision:
    """Calls of a kind are served by these until then, cheapest first; `here`: what this node has for them."""

    until_s: float
    choices: tuple[Choice, ...]
    here: tuple[Candidate, ...]
    turns: Iterator[int] = field(default_factory=itertools.count)


class Decisions:
    """For each kind of calls where it is served. Of one process."""

    def __init__(self) -> None:
        self._afar: dict[bytes, Decision] = {}
        self._stay_until_s: dict[bytes, float] = {}

    def decide(self, kind: bytes, choices: Sequence[Choice], here: Sequence[Candidate], now_s: float) -> None:
        """Elsewhere by `choices`; here where there are none."""
        if len(self._afar) + len(self._stay_until_s) >= MAX_KINDS:
            self._afar.clear()
            self._stay_until_s.clear()
        if choices:
            self._afar[kind] = Decision(now_s + DECIDED_S, by_price(choices), tuple(here))
        else:
            self._stay_until_s[kind] = now_s + DECIDED_S

    def elsewhere(self, kind: bytes, now_s: float) -> Decision | None:
        """How calls of that kind are served by other nodes; None where they are served here."""
        found = self._afar.get(kind)
        if found is not None and now_s >= found.until_s:
            self.forget(kind)
            return None
        return found

    def stays(self, kind: bytes, now_s: float) -> bool:
        """Whether it was looked at, and is served here."""
        return self._stay_until_s.get(kind, 0.0) > now_s

    def forget(self, kind: bytes) -> None:
        """Looked at anew, after a call here."""
        self._afar.pop(kind, None)


def by_price(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    return tuple(sorted(choices, key=lambda one: one.price_us))


class Walk:
    """The nodes that one call is tried on, each once: never one that is gone or away by then. `turn`: whose it is to be
    the first, of those that cost alike."""

    def __init__(self, choices: Sequence[Choice], nodes: Nodes, turn: int = 0) -> None:
        cheapest: dict[str, Choice] = {}
        for one in choices:
            cheapest.setdefault(one.node, one)
        ranked = list(cheapest.values())
        alike = [one for one in ranked if one.price_us <= ALIKE * ranked[0].price_us]
        first = turn % len(alike) if alike else 0
        self._left = iter([*alike[first:], *alike[:first], *ranked[len(alike) :]])
        self._nodes = nodes

    def next(self, now_s: float) -> Choice | None:
        """Where to try it now; None when nobody is left."""
        return next((one for one in self._left if self._nodes.may_try(one.node, now_s)), None)


def is_poisonous(deaths: int) -> bool:
    """Whether no further node may see a call that has killed so many workers."""
    return deaths >= DEATHS
