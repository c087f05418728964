"""Failpoints: off unless asked for, at the phase and passage that were asked for, and never by accident."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from layerzero.workers.failpoint import PHASES, SPOILERS, Failpoints


def test_empty_text_arms_nothing() -> None:
    """The loop skips all calls then."""
    points = Failpoints("")
    assert not points
    assert [points.hit(phase) for phase in PHASES] == [""] * len(PHASES)


def test_armed_phase_tells_the_loop_what_to_do() -> None:
    """Faults of the answer are for the loop to make."""
    for action in SPOILERS:
        points = Failpoints(f"written={action}")
        assert points
        assert [points.hit(phase) for phase in PHASES] == ["", "", "", action, ""]


def test_number_fires_at_that_passage_only() -> None:
    """A fault in the middle of a run needs the calls before and after it to go well."""
    points = Failpoints("written=stale@3")
    assert [points.hit("written") for _ in range(5)] == ["", "", "stale", "", ""]


def test_phases_count_apart() -> None:
    """A passage of one is none of another."""
    points = Failpoints("mapped=raise@2,written=garbage@1")
    assert [points.hit("written"), points.hit("mapped")] == ["garbage", ""]
    with pytest.raises(RuntimeError):
        points.hit("mapped")


def test_raise_raises_with_its_own_name() -> None:
    """A report must not look like a library's failure."""
    with pytest.raises(RuntimeError, match="failpoint executing=raise"):
        Failpoints("executing=raise").hit("executing")


@pytest.mark.parametrize(
    "text", ["nowhere=kill", "written=explode", "written", "=kill", "written=kill@x", "written=@1", "sent=silent"]
)
def test_misspelt_failpoint_is_refused(text: str) -> None:
    """A test whose fault never happens passes for nothing."""
    with pytest.raises(ValueError, match=r"failpoint|invalid literal"):
        Failpoints(text)


@pytest.mark.parametrize(
    ("action", "exit_code"),
    [("kill", -signal.SIGKILL), ("segv", -signal.SIGSEGV), ("abort", -signal.SIGABRT), ("exit0", 0)],
)
def test_deadly_action_ends_the_process_as_named(action: str, exit_code: int) -> None:
    """The faults are real, not exceptions that look like them."""
    hit = f"Failpoints('executing={action}').hit('executing')"
    code = f"from layerzero.workers.failpoint import Failpoints; {hit}; exit(9)"
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == exit_code
