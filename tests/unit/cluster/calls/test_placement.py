"""Where calls go in a cluster of a thousand nodes that die and join: tests/simulation/nodes.py says what is promised.
A failure names its seed, which `nodes.run(seed)` shows again."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from tests.simulation import nodes

from layerzero.client.connection.report import Candidate
from layerzero.cluster.calls import placement
from layerzero.cluster.calls.placement import Choice, Decisions, Nodes, Walk

SMALL = {"nodes": 150, "seconds": 3.0, "calls_a_s": 1_500, "deaths_a_s": 40}
CALM = {"nodes": 400, "seconds": 1.0, "calls_a_s": 20_000, "deaths_a_s": 0}
SEEDS = range(int(os.environ.get("LZ_SIM_SCHEDULES", "2000")) // 100)
FOUND_WITHIN = 6


def test_a_thousand_nodes_and_a_hundred_thousand_calls_a_second() -> None:
    """Every call ends once; most are served here, what few have elsewhere."""
    ends = nodes.run(0, seconds=0.15)
    assert ends["elsewhere"] > 0.15 * ends.total()
    assert ends["here"] > 0.7 * ends.total()
    assert ends["poison"] > 0


def test_smaller_clusters_in_which_more_happens() -> None:
    """Deaths are a larger share of them."""
    for seed in SEEDS:
        nodes.run(seed, **SMALL)  # type: ignore[arg-type]


def test_the_same_seed_is_the_same_run() -> None:
    assert nodes.run(7, **SMALL) == nodes.run(7, **SMALL)  # type: ignore[arg-type]
    assert nodes.run(7, **SMALL) != nodes.run(8, **SMALL)  # type: ignore[arg-type]


class TriesTheLost(Nodes):
    def lose(self, node: str, now_s: float) -> None:
        """Thinks nothing of it."""


class KeepsTheGone(Nodes):
    def see(self, alive: Collection[str]) -> None:
        super().see({*alive, *self._order})


class AsksTheFirstAlone(Nodes):
    """As it was: what none of eight nodes serves was lost, whoever else had it."""

    def rounds(self, now_s: float) -> Iterator[list[str]]:
        yield from list(super().rounds(now_s))[:1]


class AllAskTheSame(Nodes):
    def _rank(self, node: str) -> tuple[int, str]:
        return 0, node


class AsksWhoFollows(Nodes):
    """As it was: a node that is far from others like it had the calls of all between."""

    def _rank(self, node: str) -> tuple[int, str]:
        return int(node < self.own), node


class KeepsToItsChoices(Walk):
    """As it was: goes to a node that was lost a moment ago, as long as the decision holds."""

    def next(self, now_s: float) -> Choice | None:
        return next(self._left, None)


class TriesTwice(Walk):
    def __init__(self, choices: Any, nodes: Nodes, turn: int = 0) -> None:
        super().__init__(choices, nodes, turn)
        self._left = iter([one for one in self._left for _ in range(2)])


PLANTED: list[tuple[Any, Any]] = [
    (Nodes, TriesTheLost),
    (Nodes, KeepsTheGone),
    (Nodes, AsksTheFirstAlone),
    (Walk, KeepsToItsChoices),
    (Walk, TriesTwice),
    (placement.is_poisonous, lambda deaths: False),
]
UNFAIR: list[Any] = [AllAskTheSame, AsksWhoFollows]
PLANTED += [(Nodes, mutant) for mutant in UNFAIR]


@pytest.mark.parametrize(("part", "mutant"), PLANTED, ids=lambda one: one.__name__)
def test_planted_bug_is_found(part: Any, mutant: Any) -> None:
    """A simulation that finds nothing may just not look."""
    for seed in range(FOUND_WITHIN):
        try:
            nodes.run(seed, parts={part: mutant}, **(CALM if mutant in UNFAIR else SMALL))  # type: ignore[arg-type]
        except nodes.Violation:
            return
    pytest.fail(f"{FOUND_WITHIN} runs did not show it")


def choice(node: str, price_us: float) -> Choice:
    return Choice(node, Candidate("any.silu", "any", True, measured_us=price_us))


def test_nodes_that_cost_alike_take_turns() -> None:
    """The others come after them, by price."""
    made = Nodes("here")
    made.see({"a", "b", "c"})
    choices = placement.by_price([choice("c", 300), choice("b", 110), choice("a", 100), choice("a", 105)])
    walks = [Walk(choices, made, turn) for turn in range(2)]
    assert [[walk.next(0.0).node for _ in range(3)] for walk in walks] == [["a", "b", "c"], ["b", "a", "c"]]  # type: ignore[union-attr]
    assert walks[0].next(0.0) is None


def test_a_decision_holds_for_a_while_and_kinds_are_bounded() -> None:
    decisions = Decisions()
    decisions.decide(b"afar", [choice("a", 1)], (), 0.0)
    decisions.decide(b"stay", [], (), 0.0)
    assert decisions.elsewhere(b"afar", placement.DECIDED_S - 1) is not None
    assert decisions.stays(b"stay", placement.DECIDED_S - 1)
    assert decisions.elsewhere(b"afar", placement.DECIDED_S) is None
    assert not decisions.stays(b"stay", placement.DECIDED_S)
    for number in range(placement.MAX_KINDS):
        decisions.decide(b"%d" % number, [], (), 0.0)
    assert not decisions.stays(b"stay", 1.0)
