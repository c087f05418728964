from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from layerzero.broker.selection.breaker import (
    HEALTHY,
    MAX_BREAKERS,
    MAX_SIGNATURES,
    TRANSITIONS,
    BreakerSignal,
    BreakerState,
    Health,
    HealthLimits,
    failure_signature,
)

PLACE = ("torch", "matmul", "cpu")
LIMITS = HealthLimits(failures=3, window_s=30.0, backoff_s=1.0, backoff_max_s=8.0, probe_s=5.0, half_life_s=60.0)


def tripped(at_s: float = 0.0) -> Health:
    health = Health(LIMITS)
    for _ in range(LIMITS.failures):
        health.failed(*PLACE, "Boom", at_s)
    return health


def test_what_never_failed_is_healthy() -> None:
    """No entry, no cost."""
    health = Health(LIMITS)
    health.succeeded(*PLACE, 0.0)
    assert health.view(*PLACE, 1.0) == HEALTHY
    assert (health.places(), health.next_change_s(0.0), health.epoch) == ((), math.inf, 0)


def test_it_opens_at_the_third_failure_in_the_window_and_for_its_place_only() -> None:
    """A broken softmax is no reason to take matmul away."""
    health = Health(LIMITS)
    for n in range(3):
        assert not health.view(*PLACE, 0.0).is_open
        health.failed(*PLACE, "Boom", float(n))
    view = health.view(*PLACE, 2.0)
    assert (view.is_open, view.may_probe, view.retry_at_s, view.failures) == (True, False, 3.0, 3)
    assert view.last_signature == "Boom"
    assert health.view("torch", "softmax", "cpu", 2.0) == HEALTHY
    assert (health.epoch, health.next_change_s(2.0)) == (1, 3.0)


def test_failures_far_apart_do_not_open_it() -> None:
    """Three a day is life."""
    health = Health(LIMITS)
    for n in range(9):
        health.failed(*PLACE, "Boom", n * 16.0)
    assert not health.view(*PLACE, 130.0).is_open


def test_rare_failures_among_many_answers_do_not_open_it() -> None:
    """At a thousand calls a second three bad inputs come together; the kernel is fine."""
    health = Health(LIMITS)
    for n in range(3):
        for _ in range(50):
            health.succeeded(*PLACE, float(n))
        health.failed(*PLACE, "Boom", float(n))
    assert not health.view(*PLACE, 3.0).is_open


def test_after_the_back_off_one_probe_may_go() -> None:
    """A healed backend comes back; a sick one costs one call."""
    health = tripped()
    assert not health.reserve_probe(*PLACE, 0.9)
    assert health.view(*PLACE, 1.0).may_probe
    assert health.reserve_probe(*PLACE, 1.0)
    assert not health.reserve_probe(*PLACE, 1.1)
    view = health.view(*PLACE, 1.1)
    assert (view.is_open, view.may_probe, view.retry_at_s) == (True, False, 6.0)
    health.succeeded(*PLACE, 2.0)
    view = health.view(*PLACE, 2.0)
    assert (view.is_open, view.may_probe, view.retry_at_s) == (False, False, 0.0)


def test_who_only_looks_changes_nothing() -> None:
    """Else `lz explain` would keep the answer that closes a breaker from being news to those who rank."""
    looked, other = tripped(), tripped()
    assert looked.view(*PLACE, 2.0).may_probe
    for health in (looked, other):
        before = health.epoch
        health.succeeded(*PLACE, 2.0)
        assert health.epoch - before == 2  # half open, and closed


def test_a_probe_that_never_ends_is_given_up() -> None:
    """Its client may have left; nobody would ever report."""
    health = tripped()
    assert health.reserve_probe(*PLACE, 1.0)
    assert health.next_change_s(1.0) == 6.0
    assert health.reserve_probe(*PLACE, 6.0)


def test_each_failed_probe_doubles_the_back_off_up_to_its_cap() -> None:
    """A backend that stays broken is asked ever more rarely."""
    health, now_s, waits = tripped(), 0.0, []
    for _ in range(5):
        retry_at_s = health.view(*PLACE, now_s).retry_at_s
        waits.append(retry_at_s - now_s)
        now_s = retry_at_s
        assert health.reserve_probe(*PLACE, now_s)
        health.failed(*PLACE, "Boom", now_s)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_one_that_flaps_does_not_start_over_with_a_short_back_off() -> None:
    """It would lose three calls every second."""
    health = tripped()
    health.reserve_probe(*PLACE, 1.0)
    health.succeeded(*PLACE, 1.0)
    for _ in range(3):
        health.failed(*PLACE, "Boom", 2.0)
    assert health.view(*PLACE, 2.0).retry_at_s == 4.0


def test_answers_of_calls_under_way_do_not_close_it() -> None:
    """They were sent before it broke."""
    health = tripped()
    health.succeeded(*PLACE, 0.5)
    health.failed(*PLACE, "Boom", 0.5)
    view = health.view(*PLACE, 0.5)
    assert (view.is_open, view.retry_at_s) == (True, 1.0)


def test_the_penalty_fades_and_the_breaker_is_forgotten() -> None:
    """An old failure must not cost a fast kernel its place for ever."""
    health = Health(LIMITS)
    health.failed(*PLACE, "Boom", 0.0)
    assert health.view(*PLACE, 0.0).penalty == 0.5
    assert health.view(*PLACE, 60.0).penalty == pytest.approx(0.25)
    health.succeeded(*PLACE, 60.0)
    assert health.places() == (PLACE,)
    health.succeeded(*PLACE, 600.0)
    assert health.places() == ()


def test_a_repair_makes_it_as_good_as_new() -> None:
    """`lz restart` is an order."""
    health = tripped()
    health.failed("mlx", "matmul", "cpu", "Boom", 0.0)
    health.reset("torch")
    assert health.view(*PLACE, 0.0) == HEALTHY
    assert health.places() == (("mlx", "matmul", "cpu"),)


def test_failures_are_counted_by_kind() -> None:
    """`lz status` says what kinds of failure a backend has had."""
    health = Health(LIMITS)
    health.failed(*PLACE, "A", 1.0)
    health.failed(*PLACE, "B", 2.0)
    health.failed(*PLACE, "A", 3.0)
    assert health.signatures(*PLACE) == {"B": 1, "A": 2}
    assert health.signatures("mlx", "matmul", "cpu") == {}


def test_it_is_bounded_in_places_and_kinds() -> None:
    """Failure texts and ops come from other processes."""
    health = Health(LIMITS)
    for n in range(MAX_BREAKERS + 10):
        health.failed("torch", f"op{n}", "cpu", "Boom", 0.0)
    for n in range(MAX_SIGNATURES + 10):
        health.failed(*PLACE, "x" * 1000 + str(n), 0.0)
        health.failed(*PLACE, f"kind {n}", 0.0)
    assert len(health.places()) == MAX_BREAKERS
    assert len(health.signatures(*PLACE)) == MAX_SIGNATURES
    assert max(map(len, health.signatures(*PLACE))) < 200


@pytest.mark.parametrize(
    ("kind", "detail", "signature"),
    [
        ("RuntimeError", "size 3 at 0x7f00 of 17\nmore", "RuntimeError: size # at # of #"),
        ("SIGSEGV", "", "SIGSEGV"),
        ("E", "x" * 1000, "E: " + "x" * 157),
    ],
)
def test_failures_of_one_cause_share_a_signature(kind: str, detail: str, signature: str) -> None:
    """Addresses and sizes differ from call to call."""
    assert failure_signature(kind, detail) == signature


def test_every_state_knows_what_calls_can_do_to_it() -> None:
    """A missing pair would end the broker."""
    for state in BreakerState:
        assert (state, BreakerSignal.SUCCEEDED) in TRANSITIONS
        assert (state, BreakerSignal.FAILED) in TRANSITIONS
    assert (BreakerState.CLOSED, BreakerSignal.TRIPPED) in TRANSITIONS
    assert set(TRANSITIONS.values()) == set(BreakerState)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e3)), max_size=80))
def test_the_penalty_is_a_share_whatever_comes(steps: list[tuple[bool, float]]) -> None:
    """It is multiplied into the score."""
    health, now_s = Health(LIMITS), 0.0
    for is_failure, wait_s in steps:
        now_s += wait_s
        if is_failure:
            health.failed(*PLACE, "Boom", now_s)
        else:
            health.succeeded(*PLACE, now_s)
        view = health.view(*PLACE, now_s)
        assert 0.0 <= view.penalty <= 1.0
        assert view.retry_at_s <= now_s + max(LIMITS.backoff_max_s, LIMITS.probe_s)
        assert view.is_open or not view.may_probe


class Machine(RuleBasedStateMachine):
    """Any order of calls: at most one probe is out, and no breaker stays shut for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.health, self.now_s = Health(LIMITS), 0.0
        self.probe_until_s = 0.0

    @rule(wait_s=st.floats(0, 20))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s

    @rule()
    def fail(self) -> None:
        self.health.failed(*PLACE, "Boom", self.now_s)
        self.probe_until_s = 0.0

    @rule()
    def succeed(self) -> None:
        was = self.health.view(*PLACE, self.now_s)
        self.health.succeeded(*PLACE, self.now_s)
        if was.is_open and self.now_s < was.retry_at_s and not self.probe_until_s:
            assert self.health.view(*PLACE, self.now_s).is_open
        else:
            self.probe_until_s = 0.0

    @rule()
    def probe(self) -> None:
        could = self.health.view(*PLACE, self.now_s).may_probe
        assert self.health.reserve_probe(*PLACE, self.now_s) == could
        if could:
            assert self.now_s >= self.probe_until_s
            self.probe_until_s = self.now_s + LIMITS.probe_s

    @invariant()
    def an_open_one_may_be_probed_soon(self) -> None:
        view = self.health.view(*PLACE, self.now_s)
        if view.is_open and not view.may_probe:
            assert self.now_s < view.retry_at_s == self.health.next_change_s(self.now_s)


TestMachine = Machine.TestCase
