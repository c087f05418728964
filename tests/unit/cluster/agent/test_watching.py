"""What is told of nodes whose agents answer, are silent, are lost, or are of another version: nobody waits for one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from layerzero.cluster.agent import fleet, watching
from layerzero.cluster.agent.watching import Watch
from layerzero.cluster.ray_link import Node
from layerzero.ipc.errors import LayerZeroError, NotConnected
from layerzero.ipc.version import __version__


class RayError(Exception):
    pass


class Link:
    """Ray and its cluster. `answers`: what each agent says; None: nothing."""

    exceptions = type("exceptions", (), {"RayError": RayError})

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = answers
        self.dead: set[str] = set()
        self.head_is_gone = False
        self.asked: list[str] = []
        self._numbers = itertools.count()

    def nodes_of(self, ray: Any) -> list[Node]:
        if self.head_is_gone:
            raise RayError("the head is gone")
        return [Node(node, "h", node not in self.dead, {}) for node in self.answers]

    def agent_of(self, ray: Any, node: str) -> str | None:
        return None if self.answers[node] == "no agent" else node

    def ask(self, agent: str, method: str) -> tuple[str, int]:
        assert method == "seen"
        self.asked.append(agent)
        return agent, next(self._numbers)

    def ready(self, ray: Any, references: Sequence[Any], within_s: float) -> list[Any]:
        return [one for one in references if self.answers[one[0]] is not None]

    def answer_of(self, ray: Any, reference: Any, within_s: float) -> Any:
        found = self.answers[reference[0]]
        if isinstance(found, LayerZeroError):
            raise found
        return found

    def why_lost(self, exc: BaseException) -> str:
        return str(exc)


def said(version: str = __version__) -> Mapping[str, Any]:
    return {"package": version, "problem": "", "broker": None, "host": "h"}


def states_of(watch: Watch) -> dict[str, tuple[str, str]]:
    return {one.node: (one.state, one.problem) for one in watch.states()}


def test_each_node_is_told_as_it_was_seen_last() -> None:
    """One that is silent is not asked again before it has answered."""
    link = Link(good=said(), old=said("0"), bare="no agent", silent=None, broken=NotConnected("cannot be reached"))
    watch = Watch(link, link)
    for _ in range(2):
        watch.ask()
    assert states_of(watch) == {
        "good": (fleet.OK, ""),
        "old": (fleet.OK, f"runs layerzero 0, here {__version__}"),
        "bare": (fleet.NO_AGENT, "has no agent"),
        "silent": (fleet.SILENT, "its agent has said nothing yet"),
        "broken": (fleet.SILENT, "cannot be reached"),
    }
    assert {one: link.asked.count(one) for one in ("good", "silent")} == {"good": 2, "silent": 1}
    assert [one["node"] for one in watch.shown()["nodes"]] == list(link.answers)


def test_a_lost_node_is_told_at_once_and_one_that_falls_silent_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said then is not taken for how it is now; and a head that is gone makes all old."""
    link = Link(lost=said(), silent=said(), good=said())
    watch = Watch(link, link)
    watch.ask()
    link.dead = {"lost"}
    link.answers["silent"] = None
    watch.ask()
    assert states_of(watch)["lost"] == (fleet.LOST, "Ray has lost it")
    assert states_of(watch)["silent"][0] == fleet.OK
    later_s = time.monotonic() + watching.OLD_S + 1
    monkeypatch.setattr(watching.time, "monotonic", lambda: later_s)
    link.head_is_gone = True
    watch.ask()
    assert {node: state for node, (state, _) in states_of(watch).items()} == {
        "lost": fleet.LOST,
        "silent": fleet.SILENT,
        "good": fleet.SILENT,
    }
    later_s += watching.LOST_S
    assert "lost" not in states_of(watch)
