"""What calls on a GPU need of their session, which is above them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection.arena_registry import ArenaRegistry
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.report import SelectionReport
from layerzero.client.connection.routes import Routes
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.gpu.samples import Sampler


class Placed(NamedTuple):
    """A call whose memory is known, before it is enqueued. `address`: of its result, 0 where it has none."""

    request: Request
    route: Route
    arrays: tuple[Array | None, ...]
    out: Array | None
    like: Array  # one of the arrays
    gpu: Gpu
    stream: int
    address: int
    start_ns: int


class Lifting(Protocol):
    """What launches calls in this process (client/gpu/lifting/lifts.py)."""

    def serve(self, call: Placed, *, waits: bool = False) -> bool:
        """Launch a call here, if it is lifted; says whether it was. With `waits` the broker is asked meanwhile."""


class SessionView(Protocol):
    """`client/session/session.py` has it. `last.record` is of this thread's last call."""

    last: Any
    arena_registry: ArenaRegistry
    routes: Routes

    @property
    def sampler(self) -> Sampler:
        """What decides which calls are sampled."""

    @property
    def lifts(self) -> Lifting:
        """What launches calls that are lifted."""

    def note(self, record: SelectionReport | Enqueued) -> None:
        """Make `record` the one of this thread's last call."""

    def ask(self, method: str, **params: Any) -> Any:
        """Put a question to the broker, and wait for the answer."""
