"""Isolated classes: what they take, and what proxies show. Nothing runs here."""

from __future__ import annotations

from typing import Any

import pytest

import layerzero as lz

PLAIN = lz.env("plain")


class Plain:
    """It counts."""

    def __init__(self, start: int) -> None:
        self.count = start

    def add(self) -> int:
        self.count += 1
        return self.count


def test_a_class_stays_one_with_its_name() -> None:
    found: Any = lz.isolated(PLAIN, timeout_s=3, idempotent=True)(Plain)
    assert (found.__name__, found.__doc__, found.__wrapped__) == ("Plain", "It counts.", Plain)
    assert found.local(1).add() == 2
    assert found.env is PLAIN
    assert isinstance(found.local(1), found)
    assert not isinstance(1, found)
    assert lz.isolated(["numpy<2"])(Plain).env.name == "plain"
    assert "class" in repr(found.options(on_death="rebuild"))


def test_what_is_wrong_is_said_where_it_is_declared_or_called() -> None:
    with pytest.raises(lz.InvalidArgument, match=r"on_death is 'retry'; allowed: error, rebuild"):
        lz.isolated(PLAIN, on_death="retry")(Plain)
    with pytest.raises(lz.InvalidArgument, match="fallback is for functions"):
        lz.isolated(PLAIN, fallback=print)(Plain)
    found: Any = lz.isolated(PLAIN)(Plain)
    with pytest.raises(lz.InvalidArgument, match="missing a required argument: 'start'"):
        found()
    with pytest.raises(lz.InvalidArgument, match="no option nap"):
        found.options(nap=1)
    with pytest.raises(lz.InvalidArgument, match="call it first"):
        found.last_report()
    with pytest.raises(lz.NotConnected):
        found(1)
