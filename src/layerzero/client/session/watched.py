"""A call of the program that somebody watches: what it read, what came of it, and a way to run it again elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from layerzero.client.planning.plans import Plan
from layerzero.ipc.transport import messages
from layerzero.ipc.vocabulary.tensors import TensorSpec

ONLY_UNNAMED = frozenset({"NOT_PINNED", "VERSION_NOT_NAMED"})  # reasons that a call which names the backend has not

Rerun = Callable[[str, str], tuple[memoryview, float]]
"""The call's inputs as they were, on a backend and its kernel: the output, and the kernel's time in microseconds, 0.0
where none is known. Raises what the call would."""


@dataclass(frozen=True)
class WatchedCall:
    """A call that ended well. `output`: its one result's memory, which `spec` describes."""

    plan: Plan
    decision: messages.Decision
    output: memoryview
    spec: TensorSpec
    run: Rerun


class Watcher(Protocol):
    """Whoever watches. `rate`: the share of calls to be shown, 0 to 1."""

    rate: float

    def look(self, call: WatchedCall) -> None:
        """In the thread of shadow checks. Raises LayerZeroError."""

    def miss(self, why: str) -> None:
        """A call that was to be shown and is not."""


def takes(candidate: dict[str, Any]) -> bool:
    """Whether a candidate of a decision would serve the call, as it is, were it named."""
    return not candidate["transforms"] and {reason["code"] for reason in candidate["reasons"]} <= ONLY_UNNAMED
