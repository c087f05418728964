"""What happened between two answers of a broker, and what is told of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.client.metrics.test_families import answer

from layerzero.client.history.sample import Durations, Sample, Worker, between
from layerzero.ipc.shm.counter_words import BUCKETS, bucket_of


def at(up_s: float, calls: int = 0, **more: Any) -> dict[str, Any]:
    buckets = [0] * BUCKETS
    buckets[3] = calls
    durations = [["silu", "alpha", "express", buckets, 8000 * calls]]
    return {**answer(up_s=up_s, durations=durations, queued=[], errors=[], fallbacks=[], restarts=[]), **more}


def test_only_what_has_grown_is_told() -> None:
    """Rates are of the time between; a kind of calls that stood still has no row."""
    found = between(at(10, 5), at(12, 9, errors=[["silu", "alpha", "DEADLINE", 2]]), {"alpha": 4096}, {"alpha": 64})
    assert (found.seconds, found.errors) == (2, {("silu", "alpha", "DEADLINE"): 2})
    assert found.calls == {("silu", "alpha", "express"): Durations(4, 32_000, {3: 4})}
    assert found.workers == {"alpha": Worker("ready", 1, 0, 0, 4096, 64)}
    assert between(at(10, 5), at(12, 5), {}).calls == {}


def test_another_broker_begins_anew() -> None:
    """Its numbers are not less than before: all of them are new."""
    found = between(at(100, 50), at(3, 7), {})
    assert (found.seconds, found.total().count) == (3, 7)
    assert between({}, at(1, 7), {}).total().count == 7


def test_a_sample_survives_json() -> None:
    """As it is kept."""
    made = between(
        at(10), at(12, 9, fallbacks=[["silu", "alpha", "DEADLINE", 2]], restarts=[["alpha", "crash", 1]]), {}
    )
    assert Sample.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    "wrong",
    [
        {"calls": [["silu", "alpha", 1, 0, []]]},
        {"calls": [["silu", "alpha", "express", -1, 0, []]]},
        {"calls": [["silu", "alpha", "express", 1, 0, [[99, 1]]]]},
        {"errors": [["silu", "alpha", 3, 1]]},
        {"workers": [["alpha", "ready", True]]},
        {"gauges": {"clients": float("inf")}},
        {"seconds": "1"},
    ],
)
def test_what_is_no_sample_is_refused(wrong: dict[str, Any]) -> None:
    """A file may be anybody's."""
    with pytest.raises((ValueError, TypeError, KeyError)):
        Sample.from_dict({"seconds": 1.0, "gauges": {}, **wrong})


def test_quantiles_are_within_their_bucket() -> None:
    """Of 100 durations, the one at each share is at most a bucket, a factor of two, away from what is told."""
    took_us = [3 * 1.07**n for n in range(100)]
    found = Durations()
    for us in took_us:
        found.add(Durations(1, int(1000 * us), {bucket_of(int(1000 * us)): 1}))
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        told = found.quantile_us(share)
        assert told is not None
        assert 0.5 <= told / sorted(took_us)[round(share * 100) - 1] <= 2
    assert Durations().quantile_us(0.5) is None
