"""Times as people write them."""

from __future__ import annotations

import time

import pytest

from layerzero.client.history.moments import moment, seconds, time_text
from layerzero.ipc.errors import InvalidArgument

NOON = time.mktime((2026, 11, 27, 12, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "before_noon_s"),
    [
        ("11:58", 120),
        ("11:58:30", 90),
        ("2026-11-27 11:00", 3600),
        ("12:30", 23.5 * 3600),
        ("15min", 900),
        ("2h ago", 7200),
        ("90 s", 90),
    ],
)
def test_a_moment(text: str, before_noon_s: float) -> None:
    """A clock's time is the last one; one that is still to come today was yesterday."""
    assert moment(text, NOON) == NOON - before_noon_s


@pytest.mark.parametrize("text", ["", "noon", "25:00", "11:60", "2026-99-99 11:00", "0s", "-5min", "5"])
def test_what_is_no_moment(text: str) -> None:
    """The error says what is."""
    with pytest.raises(InvalidArgument, match="give a "):
        moment(text, NOON)


def test_durations_are_told_shortly() -> None:
    """With three digits or so."""
    assert [time_text(us) for us in (None, 1.25, 42.0, 1500.0, 2.5e6)] == ["", "1.2 us", "42 us", "1.5 ms", "2.5 s"]
    assert seconds("7d") == 7 * 86400
