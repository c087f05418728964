"""What the two ends of an express lane do to its page, in any order that a processor allows: tests/interleavings/lane.c
runs the headers that both are compiled of. Its own comment says what is promised."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "interleavings" / "lane.c"
SCHEDULES = 10 * int(os.environ.get("LZ_SIM_SCHEDULES", "2000"))
FIRST = 35_001  # a call out of time is rare: there is one among the next 2,000
FOUND_WITHIN = 40_000  # schedules in which a planted bug must show
BUGS = {
    "no_barrier": "is over",
    "silent_end": "is over",
    "number_first": "has the end of another",
    "double_ring": "which is not there",
    "blind_withdrawal": "was taken back and runs",
    "forgets_owed": "nobody knows whether they ran",
}


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs schedules."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("interleavings") / "lane"
    flags = ("-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function")
    subprocess.run([compiler, *flags, "-o", program, SOURCE], check=True)

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *map(str, args)], capture_output=True, text=True, timeout=300, check=False)

    return run


def test_no_order_of_words_breaks_a_promise(lane: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ran = lane(FIRST, SCHEDULES)
    assert ran.returncode == 0, ran.stdout
    ways = {way: int(count) for way, _, count in (line.rpartition(" ") for line in ran.stdout.splitlines())}
    assert min(ways[way] for way in ("ran", "taken back", "lost", "out of time", "naps", "waits for the bell")) > 0


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(lane: Callable[..., subprocess.CompletedProcess[str]], bug: str) -> None:
    ran = lane(1, FOUND_WITHIN, bug)
    assert ran.returncode == 1
    assert BUGS[bug] in ran.stdout
