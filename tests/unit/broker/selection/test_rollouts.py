"""Rollouts without a broker: which calls a share takes, what the rules say of evidence, what is remembered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from layerzero.broker.selection.rollout import PROMOTED, ROLLED_BACK, RUNNING, Rollout, Rules
from layerzero.broker.selection.rollout_evidence import Evidence, is_slower, percentile
from layerzero.broker.selection.rollouts import Rollouts
from layerzero.broker.selection.timings import PerfTable
from layerzero.ipc.errors import InvalidArgument

NEW = "alpha@2.1"
BUCKETS = [f"silu x:float32[{n}]" for n in range(2000)]


def rollout(*shares: float, **more: Any) -> Rollout:
    made = Rollout("alpha", NEW, shares or (0.05,), **more)
    made.check()
    return made


def evidence(*shares: float, shadow_rate: float = 0.0, **rules: Any) -> Evidence:
    return Evidence(rollout(*shares, rules=Rules(**rules), shadow_rate=shadow_rate), 0.0)


# --- the share


def test_a_share_is_that_of_the_calls_and_a_greater_one_only_adds() -> None:
    taken: set[tuple[int, str]] = set()
    for share in (0.05, 0.25, 0.6, 1.0):
        one = rollout(share)
        now = {(process, bucket) for process in (1, 77) for bucket in BUCKETS if one.takes(process, bucket)}
        assert taken <= now
        assert len(now) / (2 * len(BUCKETS)) == pytest.approx(share, abs=0.02)
        taken = now


def test_processes_and_versions_have_shares_of_their_own() -> None:
    one, other = rollout(0.3), replace(rollout(0.3), to="alpha@2.2")
    mine = [one.takes(1, bucket) for bucket in BUCKETS]
    assert mine == [one.takes(1, bucket) for bucket in BUCKETS]
    assert mine != [one.takes(2, bucket) for bucket in BUCKETS]
    assert mine != [other.takes(1, bucket) for bucket in BUCKETS]


def test_a_promoted_version_takes_all_and_one_that_was_rolled_back_none() -> None:
    assert all(rollout(0.05).ended(PROMOTED, "").takes(1, bucket) for bucket in BUCKETS)
    assert not any(rollout(1.0).ended(ROLLED_BACK, "").takes(1, bucket) for bucket in BUCKETS)


def test_it_comes_back_from_the_wire_as_it_was() -> None:
    one = rollout(0.05, 0.25, rules=Rules(2, 3, 1.5, 0, 60.0), shadow_rate=0.1, started_s=5.0, step=1)
    assert Rollout.of(one.to_wire()) == one
    assert str(one) == "rollout: alpha -> alpha@2.1, 25 %"
    assert str(one.ended(PROMOTED, "x")) == "rollout: alpha -> alpha@2.1, promoted"


def test_what_a_kernel_says_of_its_end_can_be_kept_and_shown() -> None:
    """Its text may be anything; a file with it must hold all the same."""
    ended = rollout(0.05).ended(ROLLED_BACK, "it said \x1b[2J\ud800\nand died" + 9999 * "x")
    assert Rollout.of(ended.to_wire()) == ended
    assert ended.why.startswith("it said  [2J \nand died")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"to": "beta@2"}, "name a backend and a version of it"),
        ({"backend": NEW, "to": f"{NEW}@3"}, "name a backend and a version of it"),
        ({"shares": [0.5, 0.25]}, "ascending"),
        ({"shares": []}, "above 0"),
        ({"shares": [0.0]}, "above 0"),
        ({"shares": [1.5]}, "up to 1"),
        ({"shares": [math.nan]}, "up to 1"),
        ({"shares": "5%"}, "a list of numbers"),
        ({"shadow_rate": 2}, "shadow_rate is 2"),
        ({"state": "odd"}, "state is 'odd'"),
        ({"step": 7}, "step is 7"),
        ({"why": "x" * 9999}, "why is"),
        ({"rules": {"max_p99": 0.5}}, "max_p99 is 0.5"),
        ({"rules": {"max_errors": -1}}, "max_errors is -1"),
        ({"rules": {"after_calls": 0}}, "give one of the two"),
        ({"rules": {"odd": 0}}, "a wrong part"),
        ({"rules": 3}, "a wrong part"),
        ({"odd": 0}, "a wrong part"),
    ],
)
def test_what_is_no_rollout_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Rollout.of({**rollout().to_wire(), **wrong})
    for value in (None, [], {"backend": "alpha"}):
        with pytest.raises(InvalidArgument):
            Rollout.of(value)


# --- the rules


def test_a_step_ends_after_so_many_calls_and_the_last_one_promotes() -> None:
    one = evidence(0.05, 1.0, after_calls=3)
    for _ in range(2):
        one.note_call(f"{NEW}.silu", (), 1.0)
    one.note_call("alpha.silu", (), 1.0)
    assert (one.change, one.lacks(1.0)) == (None, "2 of 3 calls")
    one.note_call(f"{NEW}.silu", (), 1.0)
    assert one.change is not None
    assert one.change.state == RUNNING
    one.begin_step(replace(one.rollout, step=1), 2.0)
    for _ in range(3):
        assert one.change is None
        one.note_call(f"{NEW}.silu", (), 3.0)
    assert one.change is not None
    assert one.change.state == PROMOTED
    assert "0 errors" in one.change.why
    assert "results not compared" in one.change.why
    assert "p99 not compared" in one.change.why


def test_a_step_by_time_needs_some_calls_all_the_same() -> None:
    one = evidence(after_calls=0, after_s=60.0)
    one.look(100.0)
    assert one.change is None
    assert one.due_s == 60.0
    one.note_express(20, 59.0, is_new=True)
    assert (one.change, one.lacks(59.0)) == (None, "1 s more")
    one.look(60.0)
    assert one.change is not None


def test_calls_on_the_express_lane_count_as_calls() -> None:
    one = evidence(after_calls=100)
    one.note_express(1000, 1.0, is_new=False)
    assert one.change is None
    one.note_express(100, 1.0, is_new=True)
    assert one.change is not None


def test_a_death_and_a_call_that_another_kernel_served_are_errors() -> None:
    one = evidence(max_errors=1)
    one.note_call("alpha.silu", (f"{NEW}.silu",), 1.0)
    assert (one.errors, one.change) == (1, None)
    one.note_death("the alpha@2.1 worker died (signal 9)")
    assert one.change is not None
    assert one.change == (ROLLED_BACK, "2 errors, allowed 1: the alpha@2.1 worker died (signal 9)")


def test_what_the_old_version_fails_is_not_the_new_ones_fault() -> None:
    one = evidence()
    one.note_call(f"{NEW}.silu", ("alpha.silu", "beta.silu"), 1.0)
    assert (one.errors, one.change) == (0, None)


def test_a_wrong_result_rolls_back_also_after_enough_evidence() -> None:
    one = evidence(after_calls=1, shadow_rate=0.1)
    one.note_call(f"{NEW}.silu", (), 1.0)
    assert one.lacks(1.0) == "0 of 8 comparisons"
    for _ in range(8):
        one.note_compared("alpha.silu", 1e-7, 2e-5, 1.0, is_beyond=False)
    assert one.change is not None
    assert one.change.state == PROMOTED
    one.note_compared(f"{NEW}.silu", 0.25, 2e-5, 1.0, is_beyond=True)
    assert one.change.state == ROLLED_BACK
    assert "1 wrong result, allowed 0: silu: the results of the two versions differ by 0.25" in one.change.why


def test_a_slower_p99_rolls_back_where_both_were_measured() -> None:
    perf, one = PerfTable(), evidence(after_calls=10**6)
    for us in [100.0] * 50:
        perf.note("alpha.silu", "small", us, 1.0)
    for us in [100.0] * 64:
        one.note_time(f"{NEW}.silu", "small", us, perf)
        one.note_time(f"{NEW}.silu", "large", 10 * us, perf)  # the old one has no times there
    assert one.change is None
    for us in [150.0] * 64:
        one.note_time(f"{NEW}.silu", "small", us, perf)
    assert one.change is not None
    assert one.change.state == ROLLED_BACK
    assert one.change.why == "small: p99 of 150.0 us, the old version's is 100.0 us; allowed 1.2 of that"


def test_a_few_slow_runs_are_noise() -> None:
    steady = [100.0 + n % 7 for n in range(200)]
    assert not is_slower([*steady, 900.0, 900.0], steady, 1.2)
    assert not is_slower([100.0] * 10 + [900.0] * 9, steady, 1.2)  # too few to say
    assert is_slower([*steady, *[900.0] * 20], steady, 1.2)
    assert not is_slower([2.9] * 100, [1.0] * 100, 1.2)  # within what is told apart at all
    assert percentile(range(1, 101), 0.99) == 99


# --- all of them


def test_one_rollout_for_each_backend_and_those_that_are_over_are_remembered() -> None:
    all_of_them = Rollouts()
    assert not all_of_them
    all_of_them.put(rollout(rules=Rules(after_calls=5)), 1.0)
    assert all_of_them.is_watched
    all_of_them.note_death(NEW, "it died")
    ((after, why),) = all_of_them.changes(1.0)
    assert (after.state, why) == (ROLLED_BACK, "1 error, allowed 0: it died")
    all_of_them.put(after, 2.0)
    assert not all_of_them
    assert all_of_them.changes(3.0) == []
    (fact,) = all_of_them.facts(3.0)
    assert (fact["state"], fact["share"], fact["evidence"]) == (ROLLED_BACK, 0.0, None)


def test_comparisons_of_two_versions_say_nothing_of_either_kernel() -> None:
    all_of_them = Rollouts()
    all_of_them.put(rollout(shadow_rate=1.0), 1.0)
    assert all_of_them.note_compared(f"{NEW}.silu", "alpha.silu", 0.0, 1.0, 1.0, is_beyond=False)
    assert not all_of_them.note_compared("alpha.silu", "torch.silu", 0.0, 1.0, 1.0, is_beyond=False)
    assert all_of_them.shadowed() == [["alpha", NEW, 1.0]]
    all_of_them.put(rollout().ended(ROLLED_BACK, ""), 1.0)
    assert all_of_them.note_compared(f"{NEW}.silu", "alpha.silu", 9.0, 1.0, 1.0, is_beyond=True)  # it comes late
    assert all_of_them.shadowed() == []
