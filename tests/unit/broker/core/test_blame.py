"""Who is to blame for a worker's end, case by case."""

from __future__ import annotations

import pytest

from layerzero.broker.core.blame import NOBODY, Blame, Evidence, blame_for, has_begun
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT, mark

LANE, RING, OTHER = mark(3, 1), mark(4, 1), mark(4, 2)
FIRST, SECOND, ON_OTHER = Blame(dispatch=7), Blame(dispatch=8), Blame(mark=OTHER)

CASES = {
    "an idle worker's end is nobody's": (Evidence(), NOBODY),
    "killed for a call, whatever it was in when the signal came": (
        Evidence(killed_for=FIRST, executing=8, running=(8,), begun=(9,), rings={RING: True}, rung=(10,)),
        FIRST,
    ),
    "killed for none, whatever it was in": (Evidence(killed_for=NOBODY, executing=7, running=(7,), begun=(8,)), NOBODY),
    "one that begins anew blames nobody": (Evidence(is_renewal=True, executing=7, running=(7,), begun=(8,)), NOBODY),
    "what the CPU was in": (Evidence(executing=8, running=(7, 8), begun=(6,), rings={RING: True}), SECOND),
    "what the CPU was in on a ring": (
        Evidence(executing=OTHER, begun=(6,), rings={RING: True, OTHER: False}),
        ON_OTHER,
    ),
    "what the CPU was in on a lane that only its client sees": (
        Evidence(executing=LANE, running=(7,)),
        Blame(mark=LANE),
    ),
    "a number of no open call is nobody's, but the GPU may have been in one": (
        Evidence(executing=99, running=(6,), begun=(7, 8)),
        FIRST,
    ),
    "of several streams the oldest": (Evidence(running=(6,), begun=(7, 8), rings={RING: True}, rung=(9,)), FIRST),
    "of rings the first whose inputs were there": (
        Evidence(running=(6,), rings={RING: False, OTHER: True}, rung=(9,)),
        ON_OTHER,
    ),
    "a replay, when the GPU was in nothing else": (Evidence(running=(6,), rings={RING: False}, rung=(7,)), FIRST),
    "a lost GPU is not the CPU's call's fault while the GPU had others": (
        Evidence(is_gpu_lost=True, executing=8, running=(8,), begun=(7,)),
        FIRST,
    ),
    "nor that of a call on a ring": (
        Evidence(is_gpu_lost=True, executing=RING, rings={RING: False, OTHER: True}),
        ON_OTHER,
    ),
    "a lost GPU that had no other call was lost to the one that the CPU was in": (
        Evidence(is_gpu_lost=True, executing=7, running=(7, 8)),
        FIRST,
    ),
    "a lost GPU with nothing that may have begun": (
        Evidence(is_gpu_lost=True, executing=RING, rings={RING: False}),
        NOBODY,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_blame_is_decided_by_what_is_known_of_the_end(case: str) -> None:
    """Each is a rule; who is blamed loses a backend, and its worker's death is counted against it."""
    end, blame = CASES[case]
    assert blame_for(end) == blame


def test_no_call_is_blamed_for_nobodys_fault() -> None:
    """A call that was never sent has dispatch 0, which stands for none."""
    assert not NOBODY.is_on(0)
    assert FIRST.is_on(7)


@pytest.mark.parametrize(
    ("mark", "executing", "phase", "exit_code", "began"),
    [
        (7, 7, "executing", -9, True),
        (7, 7, "written", 1, True),
        (7, 8, "executing", -9, False),
        (7, 7, "mapped", -9, False),
        (7, 7, "executing", RENEWAL_EXIT, False),
        (0, 0, "executing", -9, False),  # its worker was not told of it
        (0, 0, "idle", -9, False),
    ],
)
def test_a_call_has_begun_where_its_worker_was_in_it(
    mark: int, executing: int, phase: str, exit_code: int, began: bool
) -> None:
    assert has_begun(mark, executing, phase, exit_code) is began
