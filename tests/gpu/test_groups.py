"""Groups whose ranks have a GPU each: every call by NCCL, disagreement, deaths while a GPU waits for another, and plans
that are split over two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.gpu.gpu_site import gpu_site
from tests.process.group_ranks import Rank, all_of, form
from tests.process.harness import Site

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CALLS = "tests.gpu.group_calls"
BIG = 1 << 20


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = gpu_site(tmp_path_factory.mktemp("store"), "one", isolation="lifted")
    yield made.start()
    made.stop()


@pytest.fixture(scope="module")
def both(site: Site) -> Iterator[list[Rank]]:
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks) == [1, 1]
    yield ranks
    for rank in ranks:
        rank.close()


def on_all(ranks: list[Rank], function: str, *args: Any, **options: Any) -> list[Any]:
    return all_of(ranks, "on", f"{CALLS}:{function}", *args, **options)


@pytest.mark.parametrize("rows", [0, 1, 1000, 200_000])
def test_every_call_gives_torchs_result(both: list[Rank], rows: int) -> None:
    first, second = on_all(both, "check", rows)
    assert first == second
    assert "sum bfloat16" in first


def test_calls_that_nobody_waits_for_are_in_the_order_of_the_stream(both: list[Rank]) -> None:
    assert on_all(both, "stream_of_calls", 200) == [True, True]


def test_ranks_that_disagree_go_on(both: list[Rank]) -> None:
    for count, rank in enumerate(both, 3):
        rank.ask("on", f"{CALLS}:sum_of", count)
    assert [rank.told()["error"] for rank in both] == ["RANKS_DISAGREE"] * 2
    assert on_all(both, "sum_of", 2) == [[2.0, 2.0]] * 2


def test_a_plan_is_split_over_two_gpus(both: list[Rank]) -> None:
    assert on_all(both, "split") == [["FROZEN", 7, 2, "nccl"]] * 2


def test_a_split_plan_is_one_graph_on_each_gpu(both: list[Rank]) -> None:
    """What was lifted for one rank is lifted for the other's GPU, too."""
    first, second = on_all(both, "split_and_lifted")
    assert first == second == [True, 40, ["float32[6, 64]"] * 2]


def test_large_sums_are_made_in_tiles(both: list[Rank]) -> None:
    first, second = on_all(both, "split_and_lifted", 8, 512)
    assert first == second == [True, 40, ["float32[8, 64] in 4 tiles"] * 2]


def test_two_ranks_on_one_gpu_are_refused(site: Site) -> None:
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "one") == [1, 1]
    told = all_of(ranks, "on", f"{CALLS}:sum_of", 3, on=0, name="one")
    assert [one["error"] for one in told] == ["INVALID_ARGUMENT"] * 2
    assert "give each rank of group 'one' a GPU of its own" in told[0]["message"]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_dies_while_another_gpu_waits_for_its(site: Site, wait: bool) -> None:
    """NCCL's kernel is aborted, the GPU goes on, and the group is formed again with a new rank."""
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "dies") == [1, 1]
    assert on_all(ranks, "sum_up", name="dies") == [2.0 * BIG] * 2
    ranks[1].ask("on", f"{CALLS}:die_behind_a_long_kernel", name="dies")
    ranks[0].ask("on", f"{CALLS}:call_the_dying", wait=wait, name="dies")
    reason, took_s, total = ranks[0].told()
    assert reason == "RANK_DIED"
    assert total == 2000.0
    assert took_s < 1, "the GPU has waited for the dead rank's kernel, or the caller for all of NCCL's abort"
    print(f"told after {took_s:.2f} s")
    ranks[1].close()
    ranks[1] = Rank(site)
    ranks[0].ask("reform", name="dies")
    ranks[1].ask("form", "dies", 1, 2)
    assert [rank.told() for rank in ranks] == [[2, [[0, 1], [1, -1]]], 2]
    assert on_all(ranks, "sum_of", 2, name="dies") == [[2.0, 2.0]] * 2
    for rank in ranks:
        rank.close()


def test_a_rank_dies_while_another_gpus_graph_waits_for_its(site: Site) -> None:
    """Its kernels end, it is destroyed, and the plan is made again with a new rank."""
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "graph") == [1, 1]
    ranks[1].ask("on", f"{CALLS}:die_in_a_graph", name="graph")
    ranks[0].ask("on", f"{CALLS}:replay_beside_the_dying", name="graph")
    reason, took_s, total = ranks[0].told()
    assert (reason, total) == ("RANK_DIED", 2000.0)
    assert took_s < 1
    print(f"told after {took_s:.2f} s")
    ranks[1].close()
    ranks[1] = Rank(site)
    ranks[0].ask("reform", name="graph")
    ranks[1].ask("form", "graph", 1, 2)
    assert [rank.told() for rank in ranks][1] == 2
    assert on_all(ranks, "run_again", name="graph") == [[True]] * 2
    for rank in ranks:
        rank.close()
