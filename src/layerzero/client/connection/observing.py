"""Whether calls are recorded, and by what: client/traces sets it. While it is None, a call pays for one look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from layerzero.client.connection.call import Request, Route
    from layerzero.client.planning.plans import Plan
    from layerzero.ipc.transport.messages import Decision
    from layerzero.ipc.vocabulary.tensors import TensorSpec


class StepNote(NamedTuple):
    """A call that crossed in one message with others, as a plan's step. `specs`, `params`: as its caller gave them.
    `args`, `made`: addresses of its inputs, in order, 0 for none, and of its outputs."""

    op: str
    specs: tuple[TensorSpec | None, ...]
    params: dict[str, Any]
    plan: Plan
    decision: Decision
    kernel_ns: int
    args: Sequence[int]
    made: Sequence[int]


class Recorder(Protocol):
    """Takes what calls have to say of themselves. Costs them about a microsecond, and raises nothing."""

    def run(self, session: Any, request: Request) -> Any:
        """Run a request by Session.run, and note it. Raises what that raises."""

    def begin(self, request: Request) -> Any:
        """Of a request that is sent: what `end` is to be given."""

    def end(self, begun: Any, session: Any, value: Any, error: BaseException | None) -> None:
        """The answer of such a request was taken in this thread."""

    def note_chain(self, steps: Iterable[StepNote], start_ns: int, end_ns: int) -> None:
        """Calls that crossed as one, in their order."""

    def note_function(self, call: Any, span_ns: tuple[int, int], args: Any, kwargs: Any, value: Any) -> None:
        """A call of a function in an environment has ended (functions/calls.py). `span_ns`: when it began and ended, by
        time.perf_counter_ns; `value`: None where it failed."""

    def note_fresh(self, address: int, nbytes: int) -> None:
        """What lay there is gone: the program has the memory for something else."""

    def scope(self, name: str) -> AbstractContextManager[Any]:
        """Calls of this thread or task belong to it until it ends."""


recorder: Recorder | None = None
on_traced: Callable[[Route, float], None] | None = None
"""Hears which share of a route's calls policy wants recorded: of each that it does, and of others once it has."""
has_traced = False
