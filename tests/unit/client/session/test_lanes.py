"""client/session/lanes.py: which calls may take an express lane."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.connection.call import Route
from layerzero.client.connection.express import Lease
from layerzero.client.session.lanes import Lanes
from layerzero.client.session.shadow import NEVER


@pytest.mark.parametrize(
    ("fields", "next_seq"),
    [({}, NEVER), ({"needs_digest": True}, NEVER), ({"lease": None}, NEVER), ({}, 0)],
    ids=["leased", "needs a digest", "no lease", "sampled"],
)
def test_calls_that_the_broker_must_see_take_no_lane(fields: dict[str, Any], next_seq: int) -> None:
    """Where inputs are known to be poison, each call shows its digest to the broker."""
    nothing: Any = None
    route = Route(1, nothing, b"", **{"lease": Lease(1, 1, 0, nothing, 1), **fields})
    lane: Any = SimpleNamespace(is_ended=False, holds=lambda lease: True)
    lanes = Lanes(nothing, SimpleNamespace(next_seq=next_seq), nothing, nothing)  # type: ignore[arg-type]
    lanes.by_number[1] = lane
    assert lanes.of(route) == ((lane, route.lease) if not fields and next_seq == NEVER else None)
