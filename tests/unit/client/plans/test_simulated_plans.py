"""Random plans on simulated workers that decline, raise and die at any step, with their broker or without."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.example_counts import examples
from tests.simulation import plans
from tests.simulation.coverage import Violation

from layerzero.client.plans import layout, segments
from layerzero.client.plans.segments import Segment

SEEDS = 300


@pytest.mark.parametrize("first", range(0, examples(SEEDS), 100))
def test_plans_survive_whatever_becomes_of_their_chains(first: int) -> None:
    """Results are the function's, each step ends once, and every way for a chain to end is met."""
    fates = Counter[str]()
    for seed in range(first, first + 100):
        fates += plans.run(seed)
    assert all(fates[name] for name in plans.FATES), fates


def finds(seeds: int = 100) -> str:
    """What the simulator says of a client with a bug."""
    for seed in range(seeds):
        try:
            plans.run(seed)
        except Violation as exc:
            return str(exc)
    pytest.fail("the bug was not found")


def believes_all_ran(segment: Segment, chain: Any, end: Any, *rest: Any) -> None:
    if isinstance(end, segments.Stopped):
        end = end._replace(has_run=True)
    real_finish(segment, chain, end, *rest)


def runs_the_step_before_again(segment: Segment, chain: Any, end: Any, *rest: Any) -> None:
    if isinstance(end, segments.Stopped):
        end = end._replace(step=max(end.step - 1, 0))
    real_finish(segment, chain, end, *rest)


def needs_nothing(steps: Sequence[Any]) -> list[int]:
    return [0] * len(list(steps))


def keeps_its_lane(segment: Segment, wave: list[Any], places: Any, hold: Any) -> None:
    for chain in wave:
        chain.lane.let_go = lambda _: None
    real_wave(segment, wave, places, hold)


def is_over_when_made(program: Any, step: Any) -> list[Any]:
    return list(step.fresh)


real_finish: Callable[..., None] = Segment._finish
real_wave: Callable[..., None] = Segment._run_wave


@pytest.mark.parametrize(
    ("where", "name", "bug", "told"),
    [
        (Segment, "_finish", believes_all_ran, "times|another one"),
        (Segment, "_finish", runs_the_step_before_again, "times|another one"),
        (segments, "dependencies", needs_nothing, "another one"),
        (Segment, "_run_wave", keeps_its_lane, "two chains|left on its lane"),
        (layout, "_touched", is_over_when_made, "another one"),
    ],
)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, bug: Any, told: str) -> None:
    """Of fallbacks that leave steps out or make them twice, of order, of lanes, of slots that are shared too early."""
    monkeypatch.setattr(where, name, bug)
    assert re.search(told, finds())
