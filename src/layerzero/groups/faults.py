"""What ends a group's calls, as errors: one text, which says what to do first, and the same facts on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.ipc.errors import GroupBroken

RANK_DIED, RANK_LEFT, DEADLINE, CLOSED = "RANK_DIED", "RANK_LEFT", "DEADLINE", "CLOSED"
WORKER_DIED, BROKER_LOST, INTERRUPTED = "WORKER_DIED", "BROKER_LOST", "INTERRUPTED"
INCOMPLETE, FAILED = "INCOMPLETE", "FAILED"


def broken(reason: str, what: str, *, group: str, generation: int, ranks: Sequence[int], doing: str) -> GroupBroken:
    """`what`: a sentence about `ranks`; `doing`: the call that met it."""
    return GroupBroken(
        f"call group.reform() on all ranks: {what} (group {group!r}, {doing})",
        group=group,
        generation=generation,
        reason=reason,
        ranks=list(ranks),
        doing=doing,
    )


def named(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
