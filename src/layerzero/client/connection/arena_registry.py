"""The arenas that a broker knows of this process."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from layerzero.client.connection import arena as arenas
from layerzero.client.connection.arena import Arena
from layerzero.client.connection.link import Link

_lent_bytes: weakref.WeakKeyDictionary[Any, memoryview] = weakref.WeakKeyDictionary()


class ArenaRegistry(dict[Arena, int]):
    """Their numbers, by arena. `lent[arena]` shows the broker one that it does not know yet. `on_change` hears of each
    that comes or goes. Threads may share it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.on_change: Callable[[], object] = _nobody_hears
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)

    def __missing__(self, arena: Arena) -> int:
        with self._lock:
            number = self.get(arena)
            if number is None:
                arenas.pool.refill(arena)
                number = self.show(lambda number: self._link.add_arena(number, arena.fd, arena.nbytes))
                self[arena] = number
                self.on_change()
                arena.registrations.append(self._retire)
            return number

    def show(self, send: Callable[[int], None]) -> int:
        """Let `send` tell the broker of memory under a new number. The broker wants numbers that grow."""
        with self._lock:
            number = self.reserve()
            send(number)
            return number

    def reserve(self) -> int:
        """A number that no arena of this connection has."""
        return next(self._numbers)

    def arena(self, number: int) -> Arena:
        """The arena that the broker knows under this number."""
        return next(arena for arena, known in list(self.items()) if known == number)

    def close(self) -> None:
        """Nobody is told any more when an arena goes."""
        for arena in list(self):
            arena.registrations.remove(self._retire)
        self.clear()

    def _retire(self, arena: Arena) -> None:
        number = self.pop(arena, None)
        self.on_change()  # its addresses may come again as other memory
        if number is not None:
            self._link.retire_arena(number)


def _nobody_hears() -> None:
    pass


def lend_bytes(owner: Any, data: bytes) -> memoryview:
    """`data` in shared memory, copied once for as long as `owner` lives."""
    block = _lent_bytes.get(owner)
    if block is None:
        block, _, _ = arenas.pool.allocate(len(data))
        block[:] = data
        _lent_bytes[owner] = block
    return block
