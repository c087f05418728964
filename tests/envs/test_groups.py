"""Groups by torch's gloo, in processes of torch's environment: the same results, and real deaths. And
examples/tensor_parallel.py, as a newcomer runs it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.envs.harness import STORE
from tests.process.group_ranks import Rank, all_of, form
from tests.process.harness import ROOT, Site, processes, wait_until

import layerzero as lz
from layerzero.envs.build import build


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    build.ensure(build.resolve("torch"), store=STORE)
    made = Site(STORE, manifest_dirs="")
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="module")
def ranks(site: Site) -> Iterator[list[Rank]]:
    """Two, whose gloo runs; one that has died is replaced by the test."""
    made = [Rank(site) for _ in range(2)]
    try:
        assert form(made) == [1, 1]
        assert all_of(made, "call", "all_reduce", [2], backend="gloo") == [[3.0, 3.0]] * 2
        yield made
    finally:
        for rank in made:
            rank.close()
        assert not list((site.folder / "groups").iterdir())
        wait_until(lambda: not gloo_workers(site))


def gloo_workers(site: Site) -> list[int]:
    found = []
    for pid in processes(site.folder):
        with contextlib.suppress(OSError):
            if "groups-gloo" in os.readlink(f"/proc/{pid}/fd/2"):
                found.append(pid)
    return found


@pytest.mark.timeout(300)
def test_both_ways_give_the_same_and_the_faster_one_is_taken(ranks: list[Rank]) -> None:
    for op, shape in (("all_gather", [2]), ("reduce_scatter", [4]), ("all_to_all", [4]), ("broadcast", [3])):
        for dtype in ("float32", "int64"):
            ways = [all_of(ranks, "call", op, shape, dtype, backend=way) for way in ("gloo", "shared_memory")]
            assert ways[0] == ways[1]
    assert all_of(ranks, "call", "all_reduce", [2], "float16", backend="gloo", op="mean") == [[1.5, 1.5]] * 2
    report = all_of(ranks, "report")[0]
    assert report["path"] == "gloo"
    assert "(worker): gloo works in place" in report["text"]
    assert all_of(ranks, "tune", [4096]) == [[["all_reduce", 4096]]] * 2
    ranks[1].ask("explain", 4096)
    assert " us by shared memory, " in ranks[1].told()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "who", ["worker", pytest.param("rank", marks=pytest.mark.long), pytest.param("broker", marks=pytest.mark.long)]
)
def test_a_death_is_told_to_all_ranks_and_the_group_forms_again(site: Site, ranks: list[Rank], who: str) -> None:
    """A process of gloo, a rank's own, or the broker, while a call waits in gloo: for the one that is stopped."""
    stopped = gloo_workers(site)[0]
    os.kill(stopped, signal.SIGSTOP)
    for rank in ranks:
        rank.ask("call", "all_reduce", [1 << 20], backend="gloo")
    if who == "rank":
        ranks[1].kill()
        os.kill(stopped, signal.SIGCONT)
    elif who == "worker":
        os.kill(stopped, signal.SIGKILL)
    else:
        pid = site.broker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    left = ranks[:1] if who == "rank" else ranks
    told = [rank.told() for rank in left]
    assert {one["error"] for one in told} == {"GROUP_BROKEN"}, told
    reasons = {"worker": "WORKER_DIED", "rank": "RANK_DIED", "broker": "BROKER_LOST"}
    assert {one["facts"]["reason"] for one in told} == {reasons[who]}, told
    if who == "broker":
        os.kill(stopped, signal.SIGCONT)
        site.start()
        all_of(ranks, "connect")
    elif who == "rank":
        ranks[1] = Rank(site)
        ranks[1].ask("form", "tp", 1, 2)
    for rank in left:
        rank.ask("reform")
    generations = [rank.told() for rank in ranks]
    assert generations[0][0] > 1
    again: list[Any] = all_of(ranks, "call", "all_reduce", [2], backend="gloo")
    assert again == [[3.0, 3.0]] * 2


def test_the_example_splits_a_layer(site: Site) -> None:
    """It compares the split layer with the whole one itself."""
    with site.environment():
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        argv = [sys.executable, str(ROOT / "examples" / "tensor_parallel.py")]
        answer = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "rank 1 has (512, 256) and (256, 512): largest difference" in answer.stdout
    assert lz.GroupBroken.code not in answer.stderr
