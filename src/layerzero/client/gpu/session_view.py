"""What calls on a GPU need of their session, which is above them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from layerzero.client.arrays.recognition import Array
from layerzero.client.capsules.taking import Capsules
from layerzero.client.connection import overlay
from layerzero.client.connection.arena_registry import ArenaRegistry
from layerzero.client.connection.call import Refusal, Request, Route
from layerzero.client.connection.report import SelectionReport
from layerzero.client.connection.routes import Routes
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.gpu.samples import Sampler
from layerzero.client.planning.plans import Plan
from layerzero.ipc.cuda.driver import Context


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
    asked_in: object  # overlay.process() before its policy was read

    @property
    def has_its_policy(self) -> bool:
        """Whether the key that was made of it just now has the policy that its route has."""
        return overlay.process() is self.asked_in


class Lifting(Protocol):
    """What launches calls in this process (client/gpu/lifting/lifts.py)."""

    def serve(self, call: Placed, *, waits: bool = False) -> bool:
        """Launch a call here, if it is lifted; says whether it was. With `waits` the broker is asked meanwhile."""


class GpuRunner(Protocol):
    """What runs one signature's calls by their provider in this process (client/session/on_gpu.py)."""

    has_run: bool
    versions: dict[str, str]

    def run(self, memory: Sequence[int], stream: int) -> int:
        """Enqueue a call; the GPU's time of an earlier one in ns, or 0."""

    def capture(self, memory: Sequence[int], stream: int) -> Callable[[], Any]:
        """As `run`, into a graph, which needs what is returned."""


class InProcess(Protocol):
    """Backends in this process (client/session/local.py)."""

    def on_gpu(self, backend: str, kernel_id: str, plan: Plan, context: Context) -> GpuRunner | Refusal:
        """What runs a signature's calls here; never waits for the backend's probe."""

    def is_settled(self, backend: str, gpu: str) -> bool:
        """Whether it is known if the backend runs here."""

    def note_ran(self, route: Route, kernel_id: str, kernel_ns: int) -> None:
        """Tell the broker of a time."""

    def note_failed(self, route: Route, backend: str, kernel_id: str, exc: Exception, gpu: str) -> str:
        """Tell the broker of a failure; what a report is to say of it."""


class SessionView(Protocol):
    """`client/session/session.py` has it. `last.record` is of this thread's last call."""

    last: Any
    arena_registry: ArenaRegistry
    routes: Routes
    capsules: Capsules

    @property
    def sampler(self) -> Sampler:
        """What decides which calls are sampled."""

    @property
    def local(self) -> InProcess:
        """Backends in this process."""

    @property
    def lifts(self) -> Lifting:
        """What launches calls that are lifted."""

    def note(self, record: SelectionReport | Enqueued) -> None:
        """Make `record` the one of this thread's last call."""

    def ask(self, method: str, **params: Any) -> Any:
        """Put a question to the broker, and wait for the answer."""
