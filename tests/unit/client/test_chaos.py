"""client/chaos: the seed's schedule, the oracle, and a checker that sees each kind of broken promise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerzero.client.chaos import checker, history
from layerzero.client.chaos.schedule import DECK, schedule
from layerzero.client.chaos.work import WORKS, fold, is_right
from layerzero.ipc.errors import InvalidArgument

Lines = list[dict[str, Any]]
RUN: dict[str, Any] = {"seed": 3, "duration_s": 30.0, "gap_s": 0.5, "clients": 1}
BACKENDS = ["one", "two"]
NONCE = 77


def faults() -> Lines:
    planned = schedule(3, 30.0, gap_s=0.5, backends=BACKENDS, clients=1)
    lines = [{**f.to_dict(), "at": 100 + f.at_s, "pid": 1, "incarnation": 9, "result": "done"} for f in planned]
    first = next(line for line in lines if line["role"] == "worker")
    return [line | ({"result": "absent"} if line is not first else {}) for line in lines]


def begun(call: int, at: float, **more: Any) -> dict[str, Any]:
    return {"call": call, "op": "silu", "nonce": NONCE + call, "at": at, "alone": True, **more}


def ok(call: int, end: float, by: str = "one") -> dict[str, Any]:
    got = WORKS["silu"].expected(NONCE + call)
    return {"call": call, "end": end, "outcome": "OK", "got": got, "by": by, "attempts": 1}


def failed(call: int, end: float, outcome: str) -> dict[str, Any]:
    return {"call": call, "end": end, "outcome": outcome, "detail": ""}


def verdict(tmp_path: Path, lines: Lines, spoil: Callable[[dict[str, Any]], None] = lambda facts: None) -> Any:
    facts = {**RUN, "ops": {"silu": BACKENDS}, "begin_s": 100.0, "end_s": 1000.0}
    facts |= {"left_behind": [], "ended_badly": [], "struck": faults()}
    spoil(facts)
    (tmp_path / history.FAULTS).write_text("".join(json.dumps(line) + "\n" for line in facts.pop("struck")))
    (tmp_path / history.FACTS).write_text(json.dumps(facts))
    history.client_file(tmp_path, 0, 0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return checker.check(tmp_path)


def near() -> dict[str, Any]:
    """The one fault that struck, a worker's."""
    return next(line for line in faults() if line["result"] == "done")


def good() -> Lines:
    at = near()["at"] + 0.1
    return [
        {"did": "connect", "at": 1.0},
        begun(1, 2.0),
        begun(2, 3.0, backend="one"),
        ok(1, 4.0),
        ok(2, 5.0),
        begun(3, at),
        failed(3, at + 0.1, "BACKEND_ERROR"),
        {"did": "end", "at": at + 1, "calls": 3},
    ]


def test_a_history_without_a_fault_of_ours_is_good(tmp_path: Path) -> None:
    """And is counted."""
    found = verdict(tmp_path, good())
    assert found.violations == []
    assert (found.calls, dict(found.outcomes)) == (3, {"OK": 2, "BACKEND_ERROR": 1})
    assert found.to_dict()["ok_s"] == {"count": 2, "p50": 2.0, "p99": 2.0, "max": 2.0}


def other(lines: Lines, **changes: Any) -> Lines:
    """With another end of call 2."""
    return [line | changes if line == ok(2, 5.0) else line for line in lines]


SPOILT: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "ends twice": (lambda lines: [*lines[:-1], ok(1, 300.0), lines[-1]], "duplicate"),
    "ends without having begun": (lambda lines: [*lines[:-1], ok(9, 300.0), lines[-1]], "duplicate"),
    "never ends": (lambda lines: [line for line in lines if line != ok(2, 5.0)], "lost"),
    "is not written down": (lambda lines: [*lines[:-1], lines[-1] | {"calls": 4}], "lost"),
    "has another's result": (lambda lines: other(lines, got=WORKS["silu"].expected(NONCE + 1)), "wrong"),
    "has no result": (lambda lines: other(lines, got=[]), "wrong"),
    "ran elsewhere than asked": (lambda lines: other(lines, by="two"), "not where it was pinned"),
    "fails without a type": (lambda lines: other(lines, outcome="UNTYPED KeyError"), "not a promised error"),
    "is told of its own fault": (lambda lines: other(lines, outcome="BAD_MESSAGE"), "not a promised error"),
    "fails without a fault": (lambda lines: other(lines, outcome="BACKEND_ERROR"), "unexplained"),
    "hangs": (lambda lines: other(lines, end=400.0), "late"),
    "comes after the end": (lambda lines: [*lines, begun(8, 500.0)], "after the end"),
    "client vanishes": (lambda lines: lines[:-1], "ended badly"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_each_broken_promise_is_seen(tmp_path: Path, name: str) -> None:
    """A checker that lets one pass proves nothing."""
    spoil, rule = SPOILT[name]
    assert rule in verdict(tmp_path, spoil(good())).counts


def test_a_fault_of_one_backend_excuses_no_other(tmp_path: Path) -> None:
    """The others' calls must not notice."""
    at = near()["at"] + 0.1
    (neighbour,) = set(BACKENDS) - {near()["target"]}
    lines = [
        begun(1, at, backend=neighbour),
        failed(1, at + 0.1, "BACKEND_ERROR"),
        {"did": "end", "at": 900, "calls": 1},
    ]
    assert set(verdict(tmp_path, lines).counts) == {"unexplained"}


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda facts: facts["left_behind"].append("process 1"), "left behind"),
        (lambda facts: facts["ended_badly"].append("client 0"), "ended badly"),
        (lambda facts: facts.update(seed=4), "schedule"),
        (lambda facts: facts["struck"].pop(), "schedule"),
        (lambda facts: facts.update(clients=2), "lost"),
    ],
)
def test_what_the_run_says_of_itself_counts(tmp_path: Path, spoil: Callable[[dict[str, Any]], None], rule: str) -> None:
    """Leaks, ends by force and other faults than the seed's are violations, whatever the calls say."""
    assert rule in verdict(tmp_path, good(), spoil).counts


def test_a_killed_client_may_leave_calls_open(tmp_path: Path) -> None:
    """Nobody waits for them any more."""

    def kill(facts: dict[str, Any]) -> None:
        for line in facts["struck"]:
            if (line["role"], line["kind"]) == ("client", "kill"):
                line |= {"result": "done", "incarnation": 0}

    assert verdict(tmp_path, [begun(1, 2.0)], kill).violations == []


def test_a_folder_without_a_history_is_refused(tmp_path: Path) -> None:
    """An empty history keeps every promise."""
    with pytest.raises(InvalidArgument, match="no history"):
        checker.check(tmp_path)


def test_the_seed_is_the_schedule() -> None:
    """The same faults again, others with another seed, each kind before any comes much more often."""
    first = schedule(5, 60.0, gap_s=0.5, backends=["a", "b"], clients=3)
    assert first == schedule(5, 60.0, gap_s=0.5, backends=["b", "a"], clients=3)
    assert first != schedule(6, 60.0, gap_s=0.5, backends=["a", "b"], clients=3)
    assert {(f.role, f.kind) for f in first} == {(role, kind) for role, kinds in DECK.items() for kind in kinds}
    assert [f.at_s for f in first] == sorted(f.at_s for f in first)


@pytest.mark.parametrize("change", [{"duration_s": 3.0}, {"gap_s": 0.0}, {"backends": []}, {"clients": 0}])
def test_a_schedule_without_room_is_refused(change: dict[str, Any]) -> None:
    """It would have no faults, and look like success."""
    given: dict[str, Any] = {"duration_s": 30.0, "gap_s": 1.0, "backends": ["a"], "clients": 1} | change
    with pytest.raises(InvalidArgument):
        schedule(1, given.pop("duration_s"), **given)


@pytest.mark.parametrize("op", [op for op in WORKS if op != "null"])
def test_results_of_other_inputs_are_wrong(op: str) -> None:
    """Exchanged answers are the worst fault there is; what is noted of a result must tell them apart."""
    work = WORKS[op]
    expected = [work.expected(nonce) for nonce in range(20)]
    assert not any(is_right(expected[n], expected[m]) for n in range(20) for m in range(n))
    assert all(is_right(one, one) for one in expected)


def test_every_element_counts() -> None:
    """Also one of many."""
    wide = [0.5] * 4096
    spoilt = [*wide[:4095], 0.75]
    assert not is_right(fold(spoilt), fold(wide))
    assert not is_right(fold(wide[:-1]), fold(wide))
    assert is_right(fold(None), fold(None))
    assert not is_right(fold(wide), fold(None))
