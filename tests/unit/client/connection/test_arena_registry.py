"""client/connection/arena_registry.py: what follows when an arena goes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from layerzero.client.connection.arena import OWN_ARENA_BYTES, Pool
from layerzero.client.connection.arena_registry import ArenaRegistry


def test_what_is_remembered_by_address_is_forgotten_when_an_arena_comes_or_goes() -> None:
    """Its addresses may come again as other memory; the broker is told, too."""
    pool, link, forget = Pool(), Mock(), Mock()
    view, arena, _ = pool.allocate(OWN_ARENA_BYTES)
    registry: Any = ArenaRegistry(link)
    registry.on_change = forget
    number = registry[arena]
    forget.assert_called_once_with()
    pool._close(arena)
    assert forget.call_count == 2
    link.retire_arena.assert_called_once_with(number)
    assert not registry
    del view
