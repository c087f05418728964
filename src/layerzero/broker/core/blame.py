"""Who is to blame for a worker's end: one call, or nobody. Decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT


@dataclass(frozen=True, slots=True)
class Blame:
    """A call of the broker's by its dispatch, or one of an express lane by its mark (ipc/shm/lane.py), never both."""

    dispatch: int = 0
    mark: int = 0

    def is_on(self, dispatch: int) -> bool:
        return bool(dispatch) and self.dispatch == dispatch


NOBODY = Blame()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a worker that has ended. Calls are in the order in which it got them."""

    killed_for: Blame | None = None  # the broker has killed it
    is_renewal: bool = False  # it ended to begin anew, for the order of its calls
    is_gpu_lost: bool = False  # it ended since its GPU context was
    executing: int = 0  # a dispatch or a mark, as its control page said at the end; 0 when idle
    running: Collection[int] = ()  # dispatches that it had not answered
    begun: Sequence[int] = ()  # dispatches that it had answered, and that its GPU was seen to be able to run
    rings: Mapping[int, bool] = field(default_factory=dict)  # marks of calls on its rings; with inputs there?
    rung: Sequence[int] = ()  # dispatches of calls in graphs whose graph slots were seen rung


def has_begun(mark: int, executing: int, phase: str, exit_code: int) -> bool:
    """Whether a worker that has ended was in the middle of the call that its page names by `mark`, or done with it, and
    did not end to begin that anew. A call that it was not told of has no mark: 0."""
    return mark != 0 and mark == executing and phase in ("executing", "written") and exit_code != RENEWAL_EXIT


def blame_for(end: Evidence) -> Blame:
    """The call that a worker was killed for or died in.

    A worker that the broker killed ended for what it was killed for, and one that began anew for nothing. Of others the
    control page says what their CPU was in. Where that is nothing that is still open, or the GPU was lost, what the GPU
    was in is to blame: in which of several streams nobody can tell, so it is the oldest that may have begun.
    """
    if end.killed_for is not None:
        return end.killed_for
    if end.is_renewal:
        return NOBODY
    in_cpu, on_ring = end.executing in end.running, end.executing in end.rings
    if in_cpu and not end.is_gpu_lost:
        return Blame(dispatch=end.executing)
    if on_ring and not end.is_gpu_lost:
        return Blame(mark=end.executing)
    if end.begun:
        return Blame(dispatch=end.begun[0])
    ready = next((mark for mark, is_ready in end.rings.items() if is_ready), 0)
    if ready:
        return Blame(mark=ready)
    if end.rung:
        return Blame(dispatch=end.rung[0])
    if in_cpu:
        return Blame(dispatch=end.executing)
    return NOBODY if on_ring else Blame(mark=end.executing)  # of a lane of the CPU only its client knows its calls
