"""A call that somebody has asked for, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerzero.broker.lifting.store import Entry
from layerzero.broker.selection.signature import CallSpec


@dataclass(eq=False)
class Known:
    """A call that somebody has asked for. `entry` is there once it is known whether it is lifted."""

    number: int
    key: str
    spec: CallSpec
    kernel_id: str
    backend: str
    what: Mapping[str, str]
    alignments: tuple[int, ...]
    generation: int = 0  # of the worker that was asked
    asked_s: float = 0.0
    entry: Entry | None = None
    like: bytes = b""  # the packed form of a neighbour that was proved: one like it needs no proof of its own
    granted: CallSpec | None = None  # what a client was given leave for
    codes: tuple[str, ...] = ()  # digests of the machine code that it needs, once it was granted
    suspect_until_s: float = 0.0

    def facts(self, *, is_pending: bool) -> dict[str, Any]:
        """For `lz status`."""
        state = "asked" if self.entry is None else "lifted" if self.entry.form else "refused"
        return {
            "kernel_id": self.kernel_id,
            "backend": self.backend,
            "state": "pending" if is_pending else state,
            "reason": self.entry.reason if self.entry is not None else "",
            "detail": self.entry.detail if self.entry is not None else "",
        }
