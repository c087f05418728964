"""What calls on a GPU need of their session, which is above them."""

from __future__ import annotations

from typing import Any, Protocol

from layerzero.client.connection.arena_registry import ArenaRegistry
from layerzero.client.connection.report import SelectionReport
from layerzero.client.connection.routes import Routes
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.gpu.samples import Sampler


class SessionView(Protocol):
    """`client/session/session.py` has it. `last.record` is of this thread's last call."""

    last: Any
    arena_registry: ArenaRegistry
    routes: Routes

    @property
    def sampler(self) -> Sampler:
        """What decides which calls are sampled."""

    def note(self, record: SelectionReport | Enqueued) -> None:
        """Make `record` the one of this thread's last call."""

    def ask(self, method: str, **params: Any) -> Any:
        """Put a question to the broker, and wait for the answer."""
